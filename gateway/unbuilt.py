"""Request fields of OpenAI's and vLLM's APIs that this version does not build, by name.

Each is refused with a 400 that names it, unless it holds a value that asks for nothing (its neutral ones). A field that
changes nothing about the tokens is accepted and named in the response header `x-quire-ignored-fields`, and so is a
field that we have never heard of: nothing is silently half obeyed.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.limits import MAX_UNKNOWN_DEPTH, MAX_UNKNOWN_FIELDS
from shared.errors import InvalidRequest

_EMPTY: tuple[object, ...] = (None, [], {}, "", False)

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": _EMPTY,
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": _EMPTY,
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": _EMPTY,
    "structural_tag": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_grammar": _EMPTY,
    "guided_decoding_backend": _EMPTY,
    "guided_whitespace_pattern": _EMPTY,
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "lora": _EMPTY,
    "lora_request": _EMPTY,
    "lora_name": _EMPTY,
    "adapter": _EMPTY,
    "prompt_logprobs": (None,),
    "prompt_embeds": _EMPTY,
    "bad_words": _EMPTY,
    "allowed_token_ids": (None,),
    "logits_processors": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "truncate_prompt_tokens": (None,),
    "add_special_tokens": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "detokenize": (None, True),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "kv_transfer_params": _EMPTY,
    "vllm_xargs": _EMPTY,
    "repetition_detection": _EMPTY,
    "thinking_token_budget": (None,),
    "reasoning_effort": (None,),
    "reasoning": _EMPTY,
    "include_reasoning": (None, True, False),
    "verbosity": (None, "medium"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}

_NO_EFFECT = frozenset(
    {"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "moderation"}
)


def check_unbuilt(extra: Mapping[str, object]) -> list[str]:
    """Names of the fields in `extra` that are ignored, sorted.

    Args:
        extra: the request's fields that its body model does not have.

    Raises:
        InvalidRequest: a field that is not built asks for something, or unknown fields are too many or too deep.
    """
    ignored = []
    for name, value in extra.items():
        if name in _NEUTRAL:
            if not _is_neutral(value, _NEUTRAL[name]):
                raise InvalidRequest(f"{name}: not supported in this version", param=name, code="unsupported_value")
            continue
        if name not in _NO_EFFECT:
            _check_unknown(name, value)
        ignored.append(name)
    if len(ignored) > MAX_UNKNOWN_FIELDS:
        raise InvalidRequest(f"more than {MAX_UNKNOWN_FIELDS} unknown fields", code="unknown_fields")
    return sorted(ignored)


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Equality that keeps bool and int apart (True == 1 in Python, not in JSON)."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def _check_unknown(name: str, value: object) -> None:
    if not (name.isascii() and name.replace("_", "").replace("-", "").isalnum() and len(name) <= 64):
        raise InvalidRequest("a field name holds other characters than letters, digits, _ and -", code="unknown_field")
    if is_nested_deeper(value, MAX_UNKNOWN_DEPTH):
        raise InvalidRequest(f"{name}: unknown field, nested more than {MAX_UNKNOWN_DEPTH} deep", param=name)


def is_nested_deeper(value: object, most: int) -> bool:
    """Whether lists and objects lie in each other more than `most` levels deep in a JSON value."""
    level = _containers_in([value])
    for _ in range(most):
        level = [inner for outer in level for inner in _containers_in(outer)]
        if not level:
            return False
    return True


def _containers_in(value: object) -> list[object]:
    if not isinstance(value, (dict, list)):
        return []
    items = value.values() if isinstance(value, dict) else value
    if {dict, list}.isdisjoint(map(type, items)):
        return []
    return [item for item in items if isinstance(item, (dict, list))]
