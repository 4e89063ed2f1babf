"""From the arguments of `LLM` to the flags of `quire serve`, and errors back in the caller's words.

Every argument is the flag of the same name, so there is no second list of settings here: what exists, its range and its
default are `shared/config.py`'s alone, and the services refuse what is wrong. The table below holds only what vLLM has
and we have no flag for, with the values at which it asks for nothing. Anything else goes on as a flag and is refused by
the launcher; a flag that comes to exist is taken from that day on, whatever the table says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from shared import flags
from shared.config import ServeConfig
from shared.errors import ArgumentError

_ANY = object()
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "trust_remote_code": (False,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "fully_sharded_loras": (False,),
    "cpu_offload_gb": (0, 0.0),
    "load_format": ("auto", "safetensors"),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "calculate_kv_scales": (False,),
    "num_scheduler_steps": (1,),
    "hf_overrides": ({},),
    "limit_mm_per_prompt": ({},),
    "disable_sliding_window": (False,),
    "guided_decoding_backend": (_ANY,),  # structured output is refused request by request
    "structured_outputs_config": (_ANY,),
    "disable_log_stats": (_ANY,),  # from here on: nothing that tokens depend on
    "disable_log_requests": (_ANY,),
    "enable_log_requests": (_ANY,),
    "max_seq_len_to_capture": (_ANY,),
    "max_context_len_to_capture": (_ANY,),
    "compilation_config": (_ANY,),
    "cuda_graph_sizes": (_ANY,),
    "use_v2_block_manager": (_ANY,),
    "disable_custom_all_reduce": (_ANY,),
    "disable_async_output_proc": (_ANY,),
    "async_scheduling": (_ANY,),
    "distributed_executor_backend": (_ANY,),
    "worker_use_ray": (_ANY,),
    "engine_use_ray": (_ANY,),
    "ray_workers_use_nsight": (_ANY,),
    "max_parallel_loading_workers": (_ANY,),
    "max_logprobs": (_ANY,),
}
_OWN = frozenset({"host", "port", "gateways", "redis_url", "state_file", "die_with_parent", "parent_pid", "failpoints"})
"""Flags that services which live as long as one Python object have no use for."""
_OLDER_DRAFTS = {
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}


def to_argv(arguments: Mapping[str, Any]) -> list[str]:
    """The flags that `arguments` are. Raises `ArgumentError` for those that are none of the caller's."""
    known = flags.names(ServeConfig)
    argv: list[str] = []
    for name, value in _with_drafts(dict(arguments)).items():
        if name in _OWN:
            raise ArgumentError(f"{name}: not for services that live as long as this object; start `quire serve`, and "
                                "give its address as base_url")  # fmt: skip
        if value is not None and (name in known or not _asks_nothing(name, value)):
            argv += _flag(name, value)
    return argv


def in_callers_words(message: str, arguments: Mapping[str, Any]) -> str:
    """`message`, which names flags, with the names of arguments instead."""
    known = flags.names(ServeConfig) | arguments.keys()

    def rename(match: re.Match[str]) -> str:
        name, equals = match[1].replace("-", "_"), match[2]
        if name in known:
            is_switch = not equals and arguments.get(name) is True
            return f"{name}=True" if is_switch else name + equals
        positive = name.removeprefix("no_")
        return f"{positive}=False" if positive in known else match[0]

    text = re.sub(r" \(see [a-z ]+ --help\)", "", message)
    text = re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*)(=?)", rename, text)
    return text.replace("unrecognized arguments: ", "not supported in this version: ", 1)


def _asks_nothing(name: str, value: Any) -> bool:
    neutral = _NEUTRAL.get(name, ())
    return any(
        item is _ANY or (item == value and isinstance(item, bool) == isinstance(value, bool)) for item in neutral
    )


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)] if value else []
    return [f"{flag}={value}"]


def _with_drafts(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` with the older spelling of drafts by n-grams as `speculative_config`."""
    if arguments.get("speculative_model") != "[ngram]":
        return arguments
    del arguments["speculative_model"]
    given = {new: arguments.pop(old, None) for old, new in _OLDER_DRAFTS.items()}
    drafts = {name: value for name, value in given.items() if value is not None}
    return arguments | {"speculative_config": {"method": "ngram"} | drafts}
