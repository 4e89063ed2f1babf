"""Sampling parameters: vLLM's names and defaults, and the gateway's checks."""

from __future__ import annotations

from typing import Any

import pytest

from quire import SamplingParams
from shared.errors import ArgumentError

ALWAYS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def test_defaults_are_vllms() -> None:
    """Without arguments: 16 tokens at temperature 1; what a model's own defaults could change should be said."""
    assert SamplingParams().fields() == ALWAYS | {"max_tokens": 16}
    assert "max_tokens" not in SamplingParams(max_tokens=None).fields()


def test_all_that_is_set_is_asked_for() -> None:
    """Every field that differs from its default should be in the request, under the API's name."""
    given: dict[str, Any] = {
        "n": 2, "best_of": 3, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 0, "stop": ["x"], "stop_token_ids": [5],
        "ignore_eos": True, "max_tokens": 7, "min_tokens": 2, "logprobs": 0,
    }  # fmt: skip
    assert SamplingParams(**given, logit_bias={4: 1.0}).fields() == given | {"logit_bias": {"4": 1.0}}
    chat = SamplingParams(logprobs=3).chat_fields()
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 3)


def test_temperature_nought_is_greedy() -> None:
    """`SamplingParams(temperature=0)` should be taken as it is, also with the names first in the list by position."""
    assert SamplingParams(temperature=0).fields()["temperature"] == 0
    assert SamplingParams(2).n == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -1}, "temperature: .*got -1"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n: "),
        ({"n": 3, "best_of": 2}, "best_of: 2 is less than n 3"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens: 20 is more than max_tokens 16"),
        ({"logprobs": 1000}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"temperature": object()}, "temperature|SamplingParams"),
        ({"logit_bias": {4: 1000.0}}, "logit_bias"),
    ],
)
def test_wrong_values_are_value_errors(given: dict[str, Any], words: str) -> None:
    """A value out of range should be refused where it is given, by name."""
    with pytest.raises(ValueError, match=words):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", ["x"]),
        ("prompt_logprobs", 1),
        ("logits_processors", [len]),
        ("allowed_token_ids", [1]),
        ("structured_outputs", {"json": {}}),
        ("skip_special_tokens", False),
        ("detokenize", False),
        ("include_stop_str_in_output", True),
        ("use_beam_search", True),
    ],
)
def test_what_is_not_built_is_refused(name: str, value: Any) -> None:
    """What the gateway does not build should be refused by its own words."""
    with pytest.raises(ArgumentError, match=f"{name}: not supported in this version"):
        SamplingParams(**{name: value})
