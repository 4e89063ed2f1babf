"""How tokens are chosen, under vLLM's names; what may be asked is what the gateway takes (`gateway/openai.py`).

There is one set of checks: a `SamplingParams` is refused when it is made, by the very code that reads requests. What is
not built is refused so, too, until the gateway builds it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gateway.openai import CompletionBody, parse_body
from shared.errors import ArgumentError, InvalidRequest


class RequestOutputKind(Enum):
    """What each output of a stream holds: all so far, what is new, or there is one output only, at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_LOCAL = ("output_kind", "max_tokens")
"""Fields that are no field of a request as they are."""
_ALWAYS_SENT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Where a request is silent the model's generation_config.json may speak; an object of this class never is."""
_FIELDS_OF_REQUESTS = {"guided_decoding": "structured_outputs", "extra_args": "vllm_xargs"}


@dataclass(slots=True)
class SamplingParams:
    """See vLLM's documentation; names, order and defaults are the same. `temperature` 0 is greedy, `max_tokens` None
    goes on to the end of the context.

    Raises:
        ArgumentError: a value is out of its range, or asks for what is not built; a `ValueError`, too.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: list[Any] | None = None
    guided_decoding: Any = None
    structured_outputs: Any = None
    extra_args: dict[str, Any] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check(CompletionBody, self.fields(), what="SamplingParams")

    def clone(self) -> SamplingParams:
        """Another one with the same values."""
        return dataclasses.replace(self)

    def fields(self) -> dict[str, Any]:
        """The fields of a completion request that say the same."""
        fields: dict[str, Any] = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _ALWAYS_SENT or (field.name not in _LOCAL and value not in (field.default, None, [], {})):
                fields[_FIELDS_OF_REQUESTS.get(field.name, field.name)] = value
        if isinstance(self.logit_bias, dict) and self.logit_bias:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        for name in ("stop", "stop_token_ids"):
            if isinstance(fields.get(name), (tuple, set, frozenset)):
                fields[name] = list(fields[name])
        return fields

    def chat_fields(self) -> dict[str, Any]:
        """The fields of a chat request that say the same."""
        fields = self.fields()
        if self.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        return fields


def check(body_class: Any, fields: dict[str, Any], *, what: str) -> None:
    """Raise `ArgumentError` unless a request may have `fields`.

    Args:
        body_class: of the request's body, from `gateway/openai.py`.
        what: the class or call whose arguments they are.
    """
    try:
        _, ignored = parse_body(fields, body_class)
    except InvalidRequest as error:
        raise ArgumentError(error.message) from None
    except TypeError as error:
        raise ArgumentError(f"{what}: an argument is not of a plain type: {error}") from None
    if ignored:
        raise ArgumentError(f"{what} has no argument {', '.join(ignored)}")
