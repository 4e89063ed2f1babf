"""What errors repeat of what was given to them."""

from __future__ import annotations

import json

import pytest

from shared import config, failpoints, flags
from shared.config import ServeConfig, WorkerConfig
from shared.errors import MAX_SHOWN_CHARS, BusUnavailable, ConfigError, shorten
from shared.redis_bus import open_bus

LONG = "x" * 100_000
TAKEN = ("model", "more_models", "tokenizer", "generation_config", "served_model_name", "host", "api_key", "cache_dir",
         "data_dir", "state_file", "redis_url", "metrics_host", "failpoints", "admin_key", "lora_dir")  # fmt: skip
"""Texts that may be anything when they are read."""


@pytest.mark.parametrize("length", [0, 1, MAX_SHOWN_CHARS])
def test_what_is_short_is_shown_whole(length: int) -> None:
    """Up to the limit nothing should be left out."""
    assert shorten("y" * length) == "y" * length


@pytest.mark.parametrize("length", [MAX_SHOWN_CHARS + 1, 100_000])
def test_what_is_long_is_shown_by_both_ends(length: int) -> None:
    """Beyond the limit the beginning and the end should be shown, in as many characters as the limit has."""
    shown = shorten("begin" + "y" * (length - 8) + "end")
    assert len(shown) == MAX_SHOWN_CHARS
    assert shown.startswith("beginy")
    assert shown.endswith("yend")
    assert "y...y" in shown


@pytest.mark.parametrize("name", sorted(flags.names(ServeConfig)))
@pytest.mark.parametrize("is_variable", [False, True], ids=["flag", "variable"])
def test_no_setting_is_repeated_at_length(name: str, is_variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of 100 kB should be refused in some hundred characters that name the setting."""
    source = flags.variable(name) if is_variable else "--" + name.replace("_", "-")
    if is_variable:
        monkeypatch.setenv(source, LONG)
    argv = [] if is_variable else [f"{source}={LONG}"]
    if name in TAKEN:
        config.load(ServeConfig, argv, program="test")
        return
    with pytest.raises(ConfigError) as caught:
        config.load(ServeConfig, argv, program="test")
    assert len(str(caught.value)) < 500
    assert name in str(caught.value).lower().replace("-", "_")


@pytest.mark.parametrize(
    "argv",
    [["--" + LONG], ["--model=a", LONG], ["--max-num-seqs", LONG], ["--enforce-eager=" + LONG]],
    ids=["unknown", "twice", "number", "switch"],
)
def test_no_argument_is_repeated_at_length(argv: list[str]) -> None:
    """What argparse refuses, or we do in its place, should be short, too."""
    with pytest.raises(ConfigError) as caught:
        config.load(ServeConfig, argv, program="test")
    assert len(str(caught.value)) < 700
    assert "xxx...xxx" in str(caught.value)


def test_an_unknown_variable_is_not_repeated_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable's name may be long, too."""
    monkeypatch.setenv("QUIRE_" + LONG, "1")
    with pytest.raises(ConfigError) as caught:
        config.load(WorkerConfig, [], program="test")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "value",
    [LONG, {LONG: 1}, {"method": LONG}, {"method": "ngram", "num_speculative_tokens": LONG},
     {"method": "ngram", "num_speculative_tokens": [1] * 50_000}, {"method": "ngram", "prompt_lookup_max": LONG}],
    ids=["text", "key", "method", "count", "list", "missing"],
)  # fmt: skip
def test_a_speculative_config_is_not_repeated_at_length(value: object) -> None:
    """Whatever is wrong in it, flag and remedy should be shown and little of the value."""
    with pytest.raises(ConfigError) as caught:
        config.load(WorkerConfig, [f"--speculative-config={json.dumps(value)}"], program="test")
    assert str(caught.value).startswith("--speculative-config: ")
    assert len(str(caught.value)) < 500


async def test_a_redis_that_is_not_there_is_not_named_at_length() -> None:
    """What a lost connection is told with should be short, whatever socket was given: it is logged again and again."""
    bus = open_bus("unix:///" + LONG)
    with pytest.raises(BusUnavailable) as caught:
        await bus.ping()
    await bus.close()
    assert len(str(caught.value)) < 500


def test_a_failpoint_is_not_repeated_at_length() -> None:
    """A spec that is none should be shown by its ends."""
    with pytest.raises(ConfigError) as caught:
        failpoints.arm(LONG)
    assert len(str(caught.value)) < 500
