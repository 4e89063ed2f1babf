"""The kinds of requests that fault tests mix: greedy and seeded sampling, `n=2`, stop strings, penalties, a chat."""

from __future__ import annotations

import random
from typing import Any

MODEL = "test-llama"


def make_prompt(seed: int, length: int) -> list[int]:
    """Token ids of the test model, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(length)]


def _body(prompt_seed: int, length: int, **fields: Any) -> dict[str, Any]:
    defaults = {
        "model": MODEL,
        "prompt": make_prompt(prompt_seed, length),
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    return defaults | fields


KINDS: dict[str, dict[str, Any]] = {
    "greedy": _body(1, 20),
    "greedy-long-prompt": _body(2, 300),
    "seeded": _body(3, 30, temperature=1, seed=7),
    "seeded-top-p": _body(4, 17, temperature=1.3, top_p=0.9, top_k=50, seed=11, presence_penalty=0.5),
    "n-2": _body(5, 25, temperature=1, seed=13, n=2),
    "two-prompts": _body(6, 25) | {"prompt": [make_prompt(61, 9), make_prompt(62, 40)]},
    "repetition": _body(7, 33, repetition_penalty=1.3, logprobs=2),
    "stop-string": _body(8, 21, temperature=1, seed=5, max_tokens=120, stop=["e"]),
}
