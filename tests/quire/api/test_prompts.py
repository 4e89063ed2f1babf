"""Prompts in all their spellings."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.api.lora_request import LoRARequest
from quire.api.prompts import Prompt, read_prompts
from shared.errors import ArgumentError

IDS = Prompt(token_ids=(1, 2))


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", [Prompt(text="a")]),
        (["a", "b"], [Prompt(text="a"), Prompt(text="b")]),
        ([], []),
        ([1, 2], [IDS]),
        ([[1, 2], "a"], [IDS, Prompt(text="a")]),
        ({"prompt_token_ids": [1, 2]}, [IDS]),
        ([{"prompt": "a", "lora_request": None}], [Prompt(text="a")]),
        ([{"prompt": "a", "prompt_token_ids": (1, 2)}], [Prompt(text="a", token_ids=(1, 2))]),
        ({"prompt": "a", "cache_salt": "s", "multi_modal_data": None}, [Prompt(text="a", cache_salt="s")]),
    ],
)
def test_prompts(prompts: Any, expected: list[Prompt]) -> None:
    """One prompt or many, as text, token ids or dicts of either."""
    assert expected == read_prompts(prompts)


def test_adapters_stay_with_their_prompts() -> None:
    """A prompt's own adapter should be kept."""
    adapter = LoRARequest("sql", 1, "/adapters/sql")
    assert read_prompts({"prompt": "a", "lora_request": adapter})[0].lora_request == adapter


@pytest.mark.parametrize(("ids", "expected"), [([1, 2], [IDS]), ([[1, 2], [1, 2]], [IDS, IDS])])
def test_the_older_keyword(ids: Any, expected: list[Prompt]) -> None:
    """`prompt_token_ids=` should take the ids of one prompt or of several, with texts or without."""
    assert expected == read_prompts(None, ids)
    texts = ["a"] * len(expected)
    assert [prompt.text for prompt in read_prompts(texts, ids)] == texts


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompts: give"),
        (7, "prompts: must be a text"),
        ([1.5], "prompts: token ids must be whole numbers"),
        (["a", None], "prompts[1]: must be a text"),
        ({"text": "a"}, "prompts: 'text' is not supported"),
        ([{"prompt": None}], "prompts[0]: holds neither"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "prompts: 'multi_modal_data' is not supported"),
    ],
)
def test_what_is_no_prompt(prompts: Any, words: str) -> None:
    """Anything else should be refused, by its place in the list."""
    with pytest.raises(ArgumentError, match=re.escape(words)):
        read_prompts(prompts)


def test_ids_and_texts_must_be_as_many() -> None:
    """Ids for another number of prompts should be refused with both numbers."""
    with pytest.raises(ValueError, match="2 of them, and 1 prompts"):
        read_prompts(["a"], [[1], [2]])
