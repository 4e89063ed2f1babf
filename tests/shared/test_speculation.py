"""`--speculative-config`: vLLM's object means what it means there, and anything else is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared import config, flags
from shared.config import ServeConfig, WorkerConfig
from shared.errors import ConfigError
from shared.speculation import SpeculationConfig, parse_speculative_config

FULL = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def parse(**changes: Any) -> SpeculationConfig | None:
    return parse_speculative_config(json.dumps(FULL | changes))


def test_nothing_and_an_empty_object_are_off() -> None:
    """No flag, an empty text and `{}` should all leave speculation off."""
    assert parse_speculative_config("") is parse_speculative_config(" ") is parse_speculative_config("{}") is None
    assert WorkerConfig().engine.speculation() is None


def test_the_object_is_vllms() -> None:
    """Keys should mean what they do in vLLM, its defaults too: 5 and 5, or one for both."""
    assert parse() == SpeculationConfig(num_tokens=5, lookup_max=4, lookup_min=2)
    assert parse(prompt_lookup_min=None) == SpeculationConfig(num_tokens=5, lookup_max=4, lookup_min=4)
    assert parse(prompt_lookup_max=None) == SpeculationConfig(num_tokens=5, lookup_max=2, lookup_min=2)
    bare = parse(prompt_lookup_max=None, prompt_lookup_min=None)
    assert bare == SpeculationConfig(num_tokens=5, lookup_max=5, lookup_min=5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": "eagle"}, 'method="eagle": the only method in this version is "ngram"'),
        ({"method": None}, "method=null"),
        ({"model": "draft"}, 'model="draft": no such key'),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0: must be a whole number from 1 to 64"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens=null"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=true"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens=2.0"),
        ({"prompt_lookup_max": 17}, "prompt_lookup_max=17: must be a whole number from 1 to 16"),
        ({"prompt_lookup_min": "2"}, 'prompt_lookup_min="2"'),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min=5: must be at most prompt_lookup_max=4"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], named: str) -> None:
    """A wrong key or value should be shown with the flag and with what would be right."""
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert str(caught.value).startswith("--speculative-config: ")
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["ngram", "[]", "5", '{"method": "ngram"}', "[" * 100_000], ids=len)
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    """What is no such object should be answered with one."""
    with pytest.raises(ConfigError, match="say for example"):
        parse_speculative_config(text)


@pytest.mark.parametrize("config_class", [ServeConfig, WorkerConfig])
def test_a_service_refuses_it_at_the_start_however_it_is_given(
    config_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher and the worker should both read it, from flag and variable, and pass it on unchanged."""
    text = json.dumps(FULL)
    by_flag = config.load(config_class, [f"--speculative-config={text}"], program="test")
    monkeypatch.setenv("QUIRE_SPECULATIVE_CONFIG", text)
    by_variable = config.load(config_class, [], program="test")
    assert by_flag == by_variable == flags.parse(config_class, flags.to_argv(by_flag), {}, program="test")
    assert by_flag.engine.speculation() == parse()
    monkeypatch.setenv("QUIRE_SPECULATIVE_CONFIG", '{"method": "medusa"}')
    with pytest.raises(ConfigError, match="medusa"):
        config.load(config_class, [], program="test")
