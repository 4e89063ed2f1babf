"""From arguments of `LLM` to flags of `quire serve` and back."""

from __future__ import annotations

from typing import Any

import pytest

from quire.api.arguments import in_callers_words, to_argv
from shared import config as settings
from shared.config import ServeConfig
from shared.errors import ArgumentError, ConfigError

PUBLISHED: dict[str, Any] = {
    "block_size": 16,
    "gpu_memory_utilization": 0.90,
    "max_model_len": 4096,
    "tensor_parallel_size": 1,
    "kv_cache_dtype": "fp16",
    "swap_space": 4,
    "scheduler_delay_factor": 0.0,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 2048,
    "enforce_eager": False,
    "dtype": "float16",
    "max_loras": 4,
    "max_lora_rank": 64,
    "disable_log_stats": False,
}


def parse(argv: list[str]) -> ServeConfig:
    return settings.load(ServeConfig, argv, program="quire serve")


def test_arguments_reach_the_settings_of_their_names() -> None:
    """Every argument of the published snippets should be the setting of its name, or ask for nothing."""
    config = parse(to_argv({"model": "m", **PUBLISHED}))
    assert (config.model.model, config.model.max_model_len, config.model.dtype) == ("m", 4096, "float16")
    engine = config.engine
    assert (engine.block_size, engine.kv_cache_dtype, engine.swap_space) == (16, "fp16", 4.0)
    assert (engine.gpu_memory_utilization, engine.max_num_batched_tokens) == (0.9, 2048)
    assert (engine.enable_chunked_prefill, engine.enforce_eager) == (True, False)


def test_every_setting_can_be_given() -> None:
    """None should mean the default; switches, lists and objects be written as the launcher reads them."""
    assert to_argv({"quantization": None, "max_model_len": None}) == []
    drafts = {"method": "ngram", "num_speculative_tokens": 5}
    given = {"enable_prefix_caching": False, "served_model_name": ["a", "b"], "speculative_config": drafts, "seed": 0}
    config = parse(to_argv(given))
    assert (config.engine.enable_prefix_caching, config.model.served_model_name) == (False, ("a", "b"))
    speculation = config.engine.speculation()
    assert speculation is not None
    assert speculation.num_tokens == 5


def test_older_spelling_of_drafts() -> None:
    """`speculative_model="[ngram]"` and its companions should be one `speculative_config`."""
    older = {"speculative_model": "[ngram]", "num_speculative_tokens": 4, "ngram_prompt_lookup_max": 3}
    speculation = parse(to_argv(older)).engine.speculation()
    assert speculation is not None
    assert (speculation.num_tokens, speculation.lookup_max) == (4, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 2}, "not supported in this version: pipeline_parallel_size=2"),
        ({"trust_remote_code": True}, "not supported in this version: trust_remote_code=True"),
        ({"block_sise": 16}, "not supported in this version: block_sise=16; did you mean block_size?"),
        ({"enforce_eagr": False}, "not supported in this version: enforce_eagr=False"),
        ({"dtype": "float17"}, "dtype='float17': choose from auto, float32, bfloat16, float16"),
        ({"block_size": "many"}, "block_size='many': must be a whole number"),
        ({"swap_space": 4, "kv_layout": "contiguous"}, "swap_space=4.0 does not go with kv_layout=contiguous"),
    ],
)
def test_refusals_name_the_argument(arguments: dict[str, Any], words: str) -> None:
    """What the launcher refuses should be told in the names that the caller used."""
    with pytest.raises(ConfigError) as refused:
        parse(to_argv(arguments))
    told = in_callers_words(str(refused.value), arguments)
    assert told.startswith(words)
    assert "--" not in told


@pytest.mark.parametrize("name", ["port", "host", "redis_url", "gateways"])
def test_what_only_servers_have_is_refused(name: str) -> None:
    """Addresses of private services are nobody's choice; the error should say what to do."""
    with pytest.raises(ArgumentError, match=f"{name}: .*quire serve"):
        to_argv({name: "1"})
