"""What a client reads: JSON of answers and chunks in OpenAI's shapes, and SSE frames around chunks.

Every frame has an id line (`EventId`); an error frame has none, since it is no part of the log. A stream that fails
after its first byte ends with `data: {"error": …}` and without `[DONE]`, so a client cannot take it for complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from gateway.detokenize import TokenText
from gateway.errors import to_object
from gateway.fold import Batch, ChoiceEnd, Done, Event, EventId, RoleEvent, ShownToken, TextEvent, Usage
from shared.errors import InvalidRequest, RequestError
from shared.ids import RequestId
from shared.messages import RequestBody
from shared.work_time import cost_of

KEEP_ALIVE = b": keep-alive\n\n"
_MARK = "\0"
"""A text that occurs nowhere else in a chunk: model names come from command lines, which hold no such character."""
_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that cannot be."""


def parse_event_id(text: str) -> EventId:
    """The event id that a client sends back in `Last-Event-ID`. Raises `InvalidRequest`."""
    entries, dot, index = text.partition(".")
    digits = entries + index
    if not (dot and entries and index and digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise InvalidRequest("Last-Event-ID: must be the id of an event, like 12.0", param="Last-Event-ID")
    return EventId(int(entries), int(index))


def error_frame(error: RequestError) -> bytes:
    """The last frame of a stream that failed."""
    return b"data: " + orjson.dumps(to_object(error)) + b"\n\n"


class Renderer:
    """Turns the events of one response into frames, or into one JSON answer."""

    def __init__(
        self, request_id: RequestId, body: RequestBody, token_text: TokenText, price_per_hour: float = 0.0
    ) -> None:
        self._body = body
        self._price_per_hour = price_per_hour
        self._token_text = token_text
        self._is_chat = body.kind == "chat"
        name = "chat.completion" if self._is_chat else "text_completion"
        self._head = {"id": request_id, "object": name, "created": body.created, "model": body.model}
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        self._chunk_head = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})

    def frame(self, event_id: EventId, event: Event) -> bytes:
        """One SSE frame."""
        if isinstance(event, TextEvent) and not event.tokens and not event.token_ids:
            return self.text_frame(*event_id, event.choice, event.text)
        data = b"[DONE]" if isinstance(event, Done) else orjson.dumps(self._chunk(event))
        return b"id: %d.%d\ndata: %b\n\n" % (event_id.entries, event_id.number, data)

    def text_frame(self, entries: int, number: int, choice: int, text: str) -> bytes:
        """The frame of event `entries.number` of `choice`, which brings `text` and nothing else."""
        head, tail = self._around_text.get(choice) or self._find_around_text(choice)
        return b"id: %d.%d\ndata: %b%b%b\n\n" % (entries, number, head, orjson.dumps(text), tail)

    def frames(self, batch: Batch) -> bytes:
        """The SSE frames of `batch`."""
        if len(batch) == 1:
            return self.frame(*batch[0])
        return b"".join([self.frame(event_id, event) for event_id, event in batch])

    def answer(self, events: Iterable[Event], usage: Usage, shown_choices: Sequence[int]) -> bytes:
        """The JSON answer of a call that does not stream, with `shown_choices` numbered in their order."""
        choices = [_Collected() for _ in range(len(self._body.prompts) * self._body.n)]
        for event in events:
            if isinstance(event, TextEvent):
                choices[event.choice].add(event)
            elif isinstance(event, ChoiceEnd):
                choices[event.choice].end = event
        shown = [
            self._full_choice(index, choices[choice]) | self._prompt_ids_of_choice(choice)
            for index, choice in enumerate(shown_choices)
        ]
        head = self._head | self._prompt_ids_of_chat()
        return orjson.dumps(head | {"choices": shown, "usage": usage_object(usage, self._price_per_hour)})

    def _find_around_text(self, choice: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text in each of a choice's chunks that bring nothing but text."""
        head, _, tail = orjson.dumps(self._chunk(TextEvent(choice, _MARK))).rpartition(orjson.dumps(_MARK))
        self._around_text[choice] = head, tail
        return head, tail

    def _chunk(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Usage):
            return self._chunk_head | {"choices": [], "usage": usage_object(event, self._price_per_hour)}
        usage = {"usage": None} if self._body.include_usage else {}
        prompt_ids = self._prompt_ids_of_chat() if isinstance(event, RoleEvent) else {}
        return self._chunk_head | {"choices": [self._chunk_choice(event)]} | usage | prompt_ids

    def _chunk_choice(self, event: Event) -> dict[str, Any]:
        match event:
            case RoleEvent(choice):
                part = self._part(choice, {"role": "assistant", "content": ""}, "", (), None)
                return part | self._token_ids(()) | self._prompt_ids_of_choice(choice)
            case TextEvent(choice, text, tokens, token_ids):
                return self._part(choice, {"content": text}, text, tokens, None) | self._token_ids(token_ids)
            case ChoiceEnd(choice, reason):
                return self._part(choice, {}, "", (), reason) | self._token_ids((), event)
        raise AssertionError(f"not an event of a choice: {event}")

    def _token_ids(self, token_ids: Sequence[int], end: ChoiceEnd | None = None) -> dict[str, Any]:
        """What `return_token_ids` adds to a choice; at its `end` also what ended it."""
        if not self._body.returns_token_ids:
            return {}
        return {"token_ids": list(token_ids)} | ({} if end is None else {"stop_reason": end.stop_reason})

    def _prompt_ids_of_choice(self, choice: int) -> dict[str, Any]:
        """As vLLM does it, completions have the prompt's ids in each choice, of which there are several prompts'."""
        if self._is_chat or not self._body.returns_token_ids:
            return {}
        return {"prompt_token_ids": self._body.prompts[choice // self._body.n]}

    def _prompt_ids_of_chat(self) -> dict[str, Any]:
        """And chat has them beside its choices."""
        if not (self._is_chat and self._body.returns_token_ids):
            return {}
        return {"prompt_token_ids": self._body.prompts[0]}

    def _part(
        self, choice: int, delta: dict[str, str], text: str, tokens: tuple[ShownToken, ...], reason: str | None
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self._is_chat else {"text": text}
        logprobs = self._logprobs(tokens) if tokens else None
        return {"index": choice, **content, "logprobs": logprobs, "finish_reason": reason}

    def _full_choice(self, index: int, choice: _Collected) -> dict[str, Any]:
        text = "".join(choice.parts)
        message = {"message": {"role": "assistant", "content": text, "refusal": None}}
        content: dict[str, Any] = message if self._is_chat else {"text": text}
        wants_logprobs = self._body.sampling.num_logprobs is not None and not self._body.hides_logprobs
        logprobs = self._logprobs(tuple(choice.tokens)) if wants_logprobs else None
        reason = None if choice.end is None else choice.end.reason
        full = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return full | self._token_ids(choice.token_ids, choice.end)

    def _logprobs(self, tokens: tuple[ShownToken, ...]) -> dict[str, Any]:
        return self._chat_logprobs(tokens) if self._is_chat else self._completion_logprobs(tokens)

    def _chat_logprobs(self, tokens: tuple[ShownToken, ...]) -> dict[str, Any]:
        content = [
            self._token(token.token_id, token.logprob) | {"top_logprobs": [self._token(*item) for item in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        name, data = self._name(token_id), self._token_text.token_bytes(token_id)
        return {"token": name, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(data)}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._body.names_tokens_by_id else self._token_text.token_name(token_id)

    def _completion_logprobs(self, tokens: tuple[ShownToken, ...]) -> dict[str, Any]:
        wants_top = bool(self._body.sampling.num_logprobs)
        return {
            "text_offset": [token.text_offset for token in tokens],
            "token_logprobs": [max(token.logprob, _LOWEST_LOGPROB) for token in tokens],
            "tokens": [self._name(token.token_id) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens] if wants_top else None,
        }

    def _alternatives(self, token: ShownToken) -> dict[str, float]:
        """The best tokens, and the chosen one if it is not among them."""
        pairs = (*token.top, (token.token_id, token.logprob))
        return {self._name(id_): max(logprob, _LOWEST_LOGPROB) for id_, logprob in pairs}


class _Collected:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.tokens: list[ShownToken] = []
        self.token_ids: list[int] = []
        self.end: ChoiceEnd | None = None

    def add(self, event: TextEvent) -> None:
        self.parts.append(event.text)
        self.tokens += event.tokens
        self.token_ids += event.token_ids


def usage_object(usage: Usage, price_per_hour: float = 0.0) -> dict[str, Any]:
    """OpenAI's usage object, and what the request cost if it asked for that; null where this gateway has no price."""
    tokens = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    worked = usage.worked
    if worked is None:
        return tokens
    return tokens | {
        "cost": cost_of(worked.seconds, price_per_hour) if price_per_hour else None,
        "worker_seconds": worked.seconds,
        "worker_seconds_details": {"prefill": worked.prefill_s, "decode": worked.decode_s},
    }
