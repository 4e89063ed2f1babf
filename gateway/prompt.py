"""From a body's `prompt` or `messages` to token ids. Pure and blocking: call it in the text pool.

* `/v1/completions` text is tokenized as the tokenizer does by itself: begin-of-text added if it adds one, control
  tokens that are spelled out are control tokens (the caller writes the whole prompt).
* `/v1/chat/completions` text is the template's: it writes the control tokens; those that a message spells are inert.
* Token ids are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from gateway import limits
from gateway.chat_template import ChatTemplate, RenderedChat
from gateway.model_folder import ModelFolder
from shared.errors import InvalidRequest, shorten

_ROLES = ("system", "user", "assistant", "developer")
_NEUTRAL_MESSAGE_FIELDS: dict[str, tuple[object, ...]] = {
    "tool_calls": (None, []),
    "refusal": (None,),
    "audio": (None,),
    "function_call": (None,),
}


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    token_ids: tuple[int, ...]


Prompt = TextPrompt | IdsPrompt


def read_prompts(raw: Any, field: str = "prompt") -> list[Prompt]:
    """The prompts in `field`: a string, ids, or a list of either; counts checked before contents.

    Raises:
        InvalidRequest: anything else, an empty prompt, or more than `limits.MAX_PROMPTS`.
    """
    if isinstance(raw, str):
        return [_text_prompt(raw, field)]
    if not isinstance(raw, list):
        raise _wrong_prompt(field, "must be a string, a list of token ids, or a list of either")
    if not raw:
        raise _wrong_prompt(field, "is empty")
    if _is_int(raw[0]):
        return [_ids_prompt(raw, field)]
    if len(raw) > limits.MAX_PROMPTS:
        raise _wrong_prompt(field, f"{len(raw)} prompts, at most {limits.MAX_PROMPTS} are allowed")
    return [_read_prompt(item, f"{field}[{index}]") for index, item in enumerate(raw)]


def read_messages(raw: Any) -> list[dict[str, str]]:
    """Chat messages with plain text content.

    Raises:
        InvalidRequest: no messages, an unknown role or field, or content that is not text.
    """
    if not isinstance(raw, list) or not raw:
        raise InvalidRequest("messages: must be a non-empty list of messages", param="messages")
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(raw)]


class PromptEncoder:
    """Tokenizes prompts of one model.

    Args:
        folder: the model's text side.
        max_model_len: tokens that prompt and output may have together.
    """

    def __init__(self, folder: ModelFolder, max_model_len: int) -> None:
        self._folder = folder
        self._max_model_len = max_model_len
        added = folder.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        controls = [token.content for token in added.values() if token.special]
        source = folder.chat_template
        self._template = None if source is None else ChatTemplate(source, folder.template_tokens, controls)
        self._max_token_bytes = folder.max_token_bytes

    def encode(self, prompt: Prompt, field: str = "prompt") -> tuple[int, ...]:
        """Ids of a prompt in `field`, as completions have them.

        Raises:
            InvalidRequest: ids outside the vocabulary, no tokens at all, or a text that cannot fit the context.
        """
        if isinstance(prompt, TextPrompt):
            ids = self.encode_text(prompt.text, field=field)
            self._check_rows(ids, field)
        else:
            ids = prompt.token_ids
            self.check_ids(ids, field)
        if not ids:
            raise _wrong_prompt(field, "is empty")
        return ids

    def encode_text(self, text: str, *, adds_special_tokens: bool = True, field: str = "prompt") -> tuple[int, ...]:
        """Ids of a text in which control tokens may be spelled out. Raises `InvalidRequest` as `encode` does."""
        self._check_length(text, field)
        return tuple(self._folder.tokenizer.encode(text, add_special_tokens=adds_special_tokens).ids)

    def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Ids of a chat prompt.

        Raises:
            InvalidRequest: no template, the template refuses, or the text cannot fit the context.
        """
        if self._template is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions", param="messages",
                                 code="no_chat_template")  # fmt: skip
        self._check_length("".join(message["content"] for message in messages), "messages")
        rendered = self._template.render(messages)
        self._check_length(rendered.text, "messages")
        ids = self._encode_rendered(rendered)
        if not ids:
            raise InvalidRequest("messages: the prompt is empty", param="messages")
        self._check_rows(ids, "messages")
        return ids

    def close(self) -> None:
        """End what runs beside this process."""
        if self._template is not None:
            self._template.close()

    def _encode_rendered(self, rendered: RenderedChat) -> tuple[int, ...]:
        """Control tokens of the template are ids; between them, text whose control spellings are inert."""
        tokenizer = self._folder.tokenizer
        whole = tokenizer.encode(rendered.text, add_special_tokens=False)
        if not rendered.marker:
            return tuple(whole.ids)
        ids: list[int] = []
        begin = 0
        for token_id, (start, end) in zip(whole.ids, whole.offsets, strict=True):
            if token_id in self._special_ids:
                ids += self._encode_inert(rendered.text[begin:start].replace(rendered.marker, ""))
                ids.append(token_id)
                begin = end
        ids += self._encode_inert(rendered.text[begin:].replace(rendered.marker, ""))
        return tuple(ids)

    def _encode_inert(self, text: str) -> list[int]:
        inert: Tokenizer = self._folder.inert_tokenizer
        return list(inert.encode(text, add_special_tokens=False).ids) if text else []

    def _check_rows(self, ids: tuple[int, ...], param: str) -> None:
        """Refuse tokens that the tokenizer knows and the model has no row for."""
        rows = self._folder.vocab_size
        if self._folder.max_token_id >= rows and max(ids, default=0) >= rows:
            text = f"{param}: the tokenizer makes token {max(ids)} of it, the model has {rows}; leave that word out"
            raise InvalidRequest(text, param=param)

    def _check_length(self, text: str, param: str) -> None:
        """Refuse text that cannot fit before it is tokenized: a token is at most so many bytes."""
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        least = -(-num_bytes // self._max_token_bytes)
        if least > self._max_model_len:
            raise context_error(f"at least {least}", None, self._max_model_len, param)
        if num_bytes > limits.MAX_PROMPT_BYTES:
            raise InvalidRequest(f"{param}: {num_bytes} bytes of text, at most {limits.MAX_PROMPT_BYTES} are tokenized",
                                 param=param)  # fmt: skip

    def check_ids(self, ids: Sequence[int], field: str = "prompt") -> None:
        """Raise `InvalidRequest` that names `field` unless these ids, one at least, are of the vocabulary and fit."""
        if len(ids) > self._max_model_len:
            raise context_error(str(len(ids)), None, self._max_model_len, field)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._folder.vocab_size:
            wrong = low if low < 0 else high
            text = f"{field}: token id {shorten(wrong)} is not in the vocabulary (0 to {self._folder.vocab_size - 1})"
            raise InvalidRequest(text, param=field)


def context_error(prompt_tokens: str, max_tokens: int | None, max_model_len: int, param: str) -> InvalidRequest:
    """A prompt (with its `max_tokens`) that is longer than the model's context."""
    wanted = f"{prompt_tokens} tokens in the {param}"
    if max_tokens is not None:
        wanted += f" and {max_tokens} for the completion"
    message = f"This model's maximum context length is {max_model_len} tokens; the request has {wanted}."
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def _read_prompt(item: Any, where: str) -> Prompt:
    if isinstance(item, str):
        return _text_prompt(item, where)
    if isinstance(item, list):
        return _ids_prompt(item, where)
    raise _wrong_prompt(where, "must be a string or a list of token ids")


def _text_prompt(text: str, where: str) -> TextPrompt:
    if not text:
        raise _wrong_prompt(where, "is empty")
    return TextPrompt(text)


def _ids_prompt(items: list[Any], where: str) -> IdsPrompt:
    if not items:
        raise _wrong_prompt(where, "is empty")
    if set(map(type, items)) != {int}:
        raise _wrong_prompt(where, "token ids must be integers")
    return IdsPrompt(tuple(items))


def _wrong_prompt(where: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {problem}", param=where.partition("[")[0])


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_message(raw: Any, where: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise _wrong_message(f"{where}: must be an object")
    role = raw.get("role")
    if role not in _ROLES:
        raise _wrong_message(f"{where}.role: must be one of {', '.join(_ROLES)}")
    message = {"role": "system" if role == "developer" else role, "content": _content(raw.get("content"), where)}
    for name, value in raw.items():
        if name == "name" and isinstance(value, str):
            message["name"] = value
        elif name not in ("role", "content", "name") and value not in _NEUTRAL_MESSAGE_FIELDS.get(name, ()):
            raise _wrong_message(f"{where}: field {shorten(name)!r} is not supported")
        elif name == "name" and value is not None:
            raise _wrong_message(f"{where}.name: must be a string")
    return message


def _content(raw: Any, where: str) -> str:
    """Text content; a list of text parts is joined, as the model sees one text."""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list) or not raw:
        raise _wrong_message(f"{where}.content: must be a string or a list of text parts")
    for part in raw:
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text or part.keys() - {"type", "text"}:
            raise _wrong_message(f'{where}.content: only parts {{"type": "text", "text": "..."}} are supported')
    return "".join(part["text"] for part in raw)


def _wrong_message(text: str) -> InvalidRequest:
    return InvalidRequest(text, param="messages")
