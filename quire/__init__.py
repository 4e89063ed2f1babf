"""Quire: serve large language models with paged attention, continuous batching and durable token streams."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine
    from quire.api.llm import LLM
    from quire.api.lora_request import LoRARequest
    from quire.api.outputs import CompletionOutput, RequestOutput
    from quire.api.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]

_MODULES = {
    "AsyncEngineArgs": "async_llm",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "LLM": "llm",
    "LoRARequest": "lora_request",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    """The Python API's names, imported when they are first used: the services need none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(f"quire.api.{_MODULES[name]}"), name)
