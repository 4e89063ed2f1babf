"""The bodies of OpenAI's API as strict models: types, ranges and counts, each error naming field, value and range.

`null` means absent, everywhere. Prompts and messages are checked by hand (`prompt.py`): a union type would answer with
the errors of all its branches. Documented choices where the API leaves one:

* JSON with a key twice: the last one counts;
* `seed` -1 draws a random seed, as absence does; other negative seeds are seeds like any other;
* `max_tokens` in chat means `max_completion_tokens`; both with different values is an error;
* `stream_options` without `stream` is an error;
* `developer` messages are `system` messages;
* `best_of` equal to `n` chooses nothing and is as if absent; more than `n` cannot be streamed, as in OpenAI's API;
* `priority` as in vLLM: an integer, lower first, 0 when absent;
* `include_cost` is ours: usage says what the request cost, in a stream as if `include_usage` were true;
* `return_token_ids` as in vLLM: `token_ids` of each choice or chunk, `prompt_token_ids`, and `stop_reason` with them.
  Then logprobs hold each of those tokens, the end token and those of a stop string, too;
* `return_tokens_as_token_ids` as in vLLM: logprobs name tokens as `token_id:N`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway import limits
from gateway.unbuilt import check_unbuilt, is_nested_deeper
from shared.errors import InvalidRequest, shorten

B = TypeVar("B", bound=BaseModel)

_INT64 = 2**63

_COUNT_LIMITS = {
    "messages": limits.MAX_MESSAGES,
    "stop": limits.MAX_STOP_STRINGS,
    "stop_token_ids": limits.MAX_STOP_TOKEN_IDS,
    "logit_bias": limits.MAX_LOGIT_BIAS,
}


def _number(low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    return Field(ge=low, le=high, gt=above, allow_inf_nan=False)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, hide_input_in_errors=True)


class StreamOptions(BaseModel):
    """`include_obfuscation` and `continuous_usage_stats` exist elsewhere; here they may only be off."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerateBody(_Body):
    """What completions and chat have in common."""

    model: Annotated[str, Field(max_length=512)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, _number(0, 2)] | None = None
    top_p: Annotated[float, _number(high=1, above=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOP_K)] | None = None
    min_p: Annotated[float, _number(0, 1)] | None = None
    presence_penalty: Annotated[float, _number(-2, 2)] | None = None
    frequency_penalty: Annotated[float, _number(-2, 2)] | None = None
    repetition_penalty: Annotated[float, _number(limits.MIN_REPETITION_PENALTY, 2)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_STRING_CHARS)]
        | list[Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_STRING_CHARS)]]
        | None
    ) = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Annotated[float, _number(-100, 100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=limits.MAX_USER_CHARS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_CACHE_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = None
    include_cost: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def num_samples(self) -> int:
        """How many continuations of each prompt are computed."""
        return self.n or 1

    @property
    def is_choosy(self) -> bool:
        """Whether the client gets fewer of them than are computed."""
        return self.num_samples > (self.n or 1)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, without repeats."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(dict.fromkeys(stop))


class CompletionBody(GenerateBody):
    """POST /v1/completions. `logprobs` 0: the chosen token's only."""

    prompt: Any = None
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None

    @property
    def num_samples(self) -> int:
        """How many continuations of each prompt are computed."""
        return self.best_of or self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives a token's logprobs hold; None: not wanted."""
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        """`max_tokens` as asked for."""
        return self.max_tokens


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives a token's logprobs hold; None: not wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, or its older spelling, as asked for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class EmbeddingBody(_Body):
    """POST /v1/embeddings. The vector is that of the last token, of length 1, in the model's size; other ways of making
    one are refused."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["last"] | None = None
    normalize: Literal[True] | None = None
    dimensions: None = None
    user: Annotated[str, Field(max_length=limits.MAX_USER_CHARS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_CACHE_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = None


class TokenizeBody(_Body):
    """POST /tokenize: `prompt` text, or `messages` through the chat template."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Any = None
    return_token_strs: bool | None = None


class UnloadAdapterBody(_Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str | None = None


class LoadAdapterBody(UnloadAdapterBody):
    """POST /v1/load_lora_adapter. `base_model_name`: where several models are served, which one it changes."""

    lora_path: Annotated[str, Field(max_length=4096)] | None = None
    base_model_name: Annotated[str, Field(max_length=512)] | None = None


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        InvalidRequest: not UTF-8, not JSON (NaN, infinities and numbers beyond a double included), of too many values,
            nested too deep to be written again, or not an object.
    """
    if _count_values(data) > limits.MAX_VALUES:
        text = f"the body holds more than {limits.MAX_VALUES} fields, lists and objects; send fewer of them"
        raise InvalidRequest(text, code="too_many_values")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    if is_nested_deeper(value, limits.MAX_DEPTH):
        raise InvalidRequest(f"the body is nested more than {limits.MAX_DEPTH} levels deep", code="invalid_json")
    return value


def _count_values(data: bytes) -> int:
    """At least as many as there are fields, lists and objects in JSON; their signs inside of strings count, too."""
    return data.count(b":") + data.count(b"[") + data.count(b"{")


def parse_body(raw: dict[str, Any], body_class: type[B]) -> tuple[B, list[str]]:
    """The body, and the names of fields that are ignored.

    Raises:
        InvalidRequest: a field is wrong or not supported; `param` names it.
    """
    _check_counts(raw)
    try:
        body = body_class.model_validate(raw)
    except ValidationError as error:
        raise _to_invalid(error, raw) from None
    ignored = check_unbuilt(body.model_extra or {})
    if isinstance(body, GenerateBody):
        _check_together(body)
    return body, ignored


def _check_counts(raw: dict[str, Any]) -> None:
    """Refuse floods of fields and long arrays before any of their items is looked at."""
    if len(raw) > limits.MAX_FIELDS:
        raise InvalidRequest(f"{len(raw)} fields, at most {limits.MAX_FIELDS} are allowed", code="unknown_fields")
    for name, most in _COUNT_LIMITS.items():
        value = raw.get(name)
        if isinstance(value, (list, dict)) and len(value) > most:
            raise InvalidRequest(f"{name}: {len(value)} entries, at most {most} are allowed", param=name)


def _check_together(body: GenerateBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: only allowed with stream: true", param="stream_options")
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs: true", param="top_logprobs")
        both = (body.max_tokens, body.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            text = f"max_tokens: {both[0]} differs from max_completion_tokens {both[1]}; give one of them"
            raise InvalidRequest(text, param="max_tokens")
    if isinstance(body, CompletionBody):
        _check_best_of(body)
    limit = body.token_limit if isinstance(body, (ChatBody, CompletionBody)) else None
    if limit is not None and (body.min_tokens or 0) > limit:
        raise InvalidRequest(f"min_tokens: {body.min_tokens} is more than max_tokens {limit}", param="min_tokens")


def _check_best_of(body: CompletionBody) -> None:
    if body.num_samples < (body.n or 1):
        text = f"best_of: {body.best_of} is less than n {body.n}; ask for at least as many"
        raise InvalidRequest(text, param="best_of")
    if body.is_choosy and body.stream:
        text = f"best_of: {body.best_of} with stream: true: the best are known at the end only; leave one of them out"
        raise InvalidRequest(text, param="best_of")


def _to_invalid(error: ValidationError, raw: dict[str, Any]) -> InvalidRequest:
    """The first of pydantic's errors; `stop` reports each branch of its union, the last one is the fitting one."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    names = [str(part) for part in first["loc"] if part != "[key]"]
    field = names[0] if names else ""
    if field == "stop":
        return InvalidRequest(f"stop: must be a non-empty string of at most {limits.MAX_STOP_STRING_CHARS} characters, "
                              f"or a list of at most {limits.MAX_STOP_STRINGS} such strings", param="stop")  # fmt: skip
    shown = shorten(".".join(names))
    return InvalidRequest(f"{shown}: {first['msg']}, got {_show(raw, first['loc'])}", param=field or None)


def _show(raw: Any, path: tuple[int | str, ...]) -> str:
    """The value at `path`, short; long text and containers by their type only."""
    value = raw
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return "no value"
    if isinstance(value, (str, dict, list)) and len(value) > 40:
        return f"a {'string' if isinstance(value, str) else type(value).__name__} of length {len(value)}"
    return shorten(orjson.dumps(value).decode())
