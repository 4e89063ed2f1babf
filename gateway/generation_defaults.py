"""What a model's generation_config.json says of sampling, for requests that do not say it themselves.

As in vLLM: the fields below only, `do_sample` is passed over, and `--generation-config vllm` passes over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.openai import GenerateBody
from shared.errors import ConfigError

G = TypeVar("G", bound=GenerateBody)

_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_defaults(generation_config: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The fields of a request that `generation_config` names a value for.

    Args:
        source: what the file is called in an error.

    Raises:
        ConfigError: a value is none that a request may have.
    """
    named = {_FIELDS[name]: generation_config[name] for name in _FIELDS if generation_config.get(name) is not None}
    try:
        GenerateBody.model_validate(named)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ConfigError(f"{source}: {first['loc'][0]}={first['input']}: {first['msg']}; correct it, or start with "
                          "--generation-config=vllm") from None  # fmt: skip
    return named


def with_defaults(request: G, defaults: Mapping[str, Any]) -> G:
    """`request`, and `defaults` where it is silent; but for `max_tokens`, which must fit beside the prompt."""
    missing = {
        name: value for name, value in defaults.items() if name != "max_tokens" and getattr(request, name) is None
    }
    return request.model_copy(update=missing) if missing else request
