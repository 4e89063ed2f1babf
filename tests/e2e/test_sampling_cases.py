"""What sampling parameters do to tokens, through the whole cell, against `transformers` where there is a formula."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from quire.bench.model_shapes import SHAPES
from quire.bench.random_model import write_random_model
from shared.ids import RequestId
from shared.log import TokenEntry, decode_entries
from shared.redis_bus import open_bus
from tests.e2e.cell import Cell
from tests.e2e.reference import GreedyReference
from tests.faults.checker import wait_for_preemptions

MODEL = "test-llama"
PROMPT = [17, 250, 33, 408, 91, 33, 17]


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> GreedyReference:
    return GreedyReference(model_folder)


async def complete(cell: Cell, **fields: Any) -> dict[str, Any]:
    """One answer of /v1/completions, with the token ids of its choices (from the log) as `ids`."""
    body = {"model": cell.model_name, "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True} | fields
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.post(cell.url + "/v1/completions", json=body) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
    answer["ids"] = await _read_ids(cell, answer["id"])
    return answer


async def _read_ids(cell: Cell, request_id: str) -> list[list[int]]:
    bus = open_bus(cell.redis_url)
    try:
        entries = decode_entries(await bus.read_log(RequestId(request_id)))
    finally:
        await bus.close()
    tokens = [entry for entry in entries if isinstance(entry, TokenEntry)]
    return [[e.token_id for e in tokens if e.choice == c] for c in sorted({e.choice for e in tokens})]


@pytest.mark.case(39)
async def test_logit_bias_forces_and_bans(cell: Cell) -> None:
    """A bias of 100 should draw that token each time, one of -100 on the greedy token never."""
    greedy = (await complete(cell, temperature=0))["ids"][0]
    forced = (await complete(cell, temperature=0, max_tokens=2, logit_bias={"123": 100}))["ids"][0]
    assert forced == [123, 123]
    banned = (await complete(cell, temperature=0, logit_bias={str(greedy[0]): -100}))["ids"][0]
    assert greedy[0] not in banned


@pytest.mark.case(39)
async def test_logit_bias_holds_after_a_preemption(start_cell: Callable[..., Cell]) -> None:
    """A request that was preempted should keep its bias."""
    cell = start_cell("--kv-cache-memory-bytes=655360", "--max-model-len=500", "--admission-headroom=0")
    biased = {"temperature": 1.0, "max_tokens": 430, "logit_bias": {"123": 100}}
    answers = await asyncio.gather(*(complete(cell, prompt=[20 + i] * 60, **biased) for i in range(12)))
    assert all(answer["ids"] == [[123] * 430] for answer in answers)
    await wait_for_preemptions(cell.url, 1)


@pytest.mark.case(42)
async def test_a_greedy_row_is_not_disturbed_by_random_rows(cell: Cell) -> None:
    """A greedy row with extreme biases should equal its solo run beside random rows, with finite logprobs."""
    fields: dict[str, Any] = {"temperature": 0, "logprobs": 3, "max_tokens": 20}
    fields["logit_bias"] = {str(i): -100 for i in range(0, 400, 2)}
    alone = await complete(cell, **fields)
    crowd = [complete(cell, temperature=1, max_tokens=20, prompt=[i + 9, i + 50]) for i in range(8)]
    beside, *_ = await asyncio.gather(complete(cell, **fields), *crowd)
    assert beside["ids"] == alone["ids"]
    assert beside["choices"] == alone["choices"]
    assert all(math.isfinite(p) for p in beside["choices"][0]["logprobs"]["token_logprobs"])


@pytest.mark.case(43)
async def test_top_logprobs_follow_the_position(cell: Cell, reference: GreedyReference) -> None:
    """Alternatives should differ by position, match a forward of `transformers`, and hold the chosen token's value."""
    answer = await complete(cell, temperature=0, logprobs=3)
    logprobs, ids = answer["choices"][0]["logprobs"], answer["ids"][0]
    expected = reference.logprobs(PROMPT, ids)
    shown = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
    assert len({tuple(values) for values in shown}) == len(ids)
    for position, token_id in enumerate(ids):
        assert shown[position] == pytest.approx(expected[position].topk(3).values.tolist(), abs=1e-3)
        chosen = logprobs["token_logprobs"][position]
        assert chosen == pytest.approx(float(expected[position, token_id]), abs=1e-3)
        assert chosen in shown[position]


@pytest.mark.case(45)
async def test_logprobs_are_the_raw_models(cell: Cell, reference: GreedyReference) -> None:
    """Logprobs should not change with temperature, top_k or penalties: they are the unprocessed model's."""
    forced = {"logit_bias": {"123": 100}, "logprobs": 0, "max_tokens": 3}
    answers = [await complete(cell, temperature=t, top_k=k, **forced) for t, k in ((0, -1), (0.7, 5), (2, -1))]
    shown = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in answers]
    assert shown[0] == shown[1] == shown[2]
    expected = reference.logprobs(PROMPT, [123] * 3)[:, 123].tolist()
    assert shown[0] == pytest.approx(expected, abs=1e-3)


@pytest.mark.case(47)
async def test_penalties_count_what_they_should(cell: Cell, reference: GreedyReference) -> None:
    """Presence and frequency penalties should count output tokens only, the repetition penalty prompt and output."""
    prompt = [123] * 3 + [45] * 3
    plain = reference.logprobs(prompt, [0])[0]
    answer = await complete(cell, prompt=prompt, temperature=0, max_tokens=2, presence_penalty=2, frequency_penalty=2)
    first, second = answer["ids"][0]
    assert first == int(plain.argmax()), "nothing was put out yet, so nothing is penalized"
    behind = reference.logprobs(prompt, [first, 0])[1].clone()
    behind[first] -= 4
    assert second == int(behind.argmax())


@pytest.mark.case(49)
@pytest.mark.parametrize("penalty", [1.3, 1.8])
async def test_repetition_penalty_equals_the_reference(cell: Cell, reference: GreedyReference, penalty: float) -> None:
    """Greedy with a repetition penalty should give what `transformers`' own processor gives."""
    prompt = [123, 45, 123, 45, 123, 45]
    ids = (await complete(cell, prompt=prompt, temperature=0, max_tokens=12, repetition_penalty=penalty))["ids"][0]
    plain = (await complete(cell, prompt=prompt, temperature=0, max_tokens=12))["ids"][0]
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    logits = reference.logits(prompt, ids)
    for position, token_id in enumerate(ids):
        seen = torch.tensor([prompt + ids[:position]])
        assert token_id == int(processor(seen, logits[position : position + 1]).argmax())
    assert ids != plain


@pytest.mark.case(50)
async def test_padded_ids_are_never_drawn(start_cell: Callable[..., Cell], tmp_path: Path) -> None:
    """With logits wider than the tokenizer, no id without a token should come, and a bias on one be refused."""
    shape = dataclasses.replace(SHAPES["test"], vocab_size=1024)
    cell = start_cell(model=write_random_model(shape, tmp_path / "padded"))
    answers = await asyncio.gather(*(complete(cell, temperature=2, max_tokens=100, seed=i) for i in range(6)))
    drawn = {token_id for answer in answers for token_id in answer["ids"][0]}
    assert max(drawn) < 512
    assert len(drawn) > 100, "the draw is wide enough to have met padded ids"
    async with aiohttp.ClientSession() as session:
        body = {"model": "padded", "prompt": PROMPT, "logit_bias": {"700": 1}}
        async with session.post(cell.url + "/v1/completions", json=body) as response:
            assert response.status == 400


@pytest.mark.case(54)
async def test_unseeded_calls_differ(cell: Cell) -> None:
    """Equal calls without a seed should not all give the same, nor should the choices of one call."""
    answers = await asyncio.gather(*(complete(cell, temperature=1, max_tokens=8) for _ in range(8)))
    assert len({tuple(answer["ids"][0]) for answer in answers}) >= 2
    many = await complete(cell, temperature=1, max_tokens=8, n=4)
    assert len({tuple(ids) for ids in many["ids"]}) >= 2


@pytest.mark.case(22)
async def test_a_seed_fixes_every_choice(cell: Cell) -> None:
    """With a seed, each choice should be the same in every call, and differ from the others."""
    first, again = [await complete(cell, temperature=1, max_tokens=8, n=3, seed=7) for _ in range(2)]
    assert first["ids"] == again["ids"]
    assert len({tuple(ids) for ids in first["ids"]}) == 3


@pytest.mark.case(55)
async def test_greedy_text_does_not_depend_on_load(cell: Cell) -> None:
    """One prompt alone, then among 1 to 32 others, should give byte-identical answers (fp32)."""
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "logprobs": 2}
    alone = await complete(cell, **fields)
    for num_others in (1, 5, 12, 20, 32):
        others = [complete(cell, prompt=[i + 9] * (i * 3 + 1), temperature=1, max_tokens=30) for i in range(num_others)]
        among, *_ = await asyncio.gather(complete(cell, **fields), *others)
        assert among["ids"] == alone["ids"]
        assert among["choices"] == alone["choices"]


@pytest.mark.case(81)
async def test_the_same_prompt_again_gives_the_same(cell: Cell, reference: GreedyReference) -> None:
    """P, again P, then P and more should each give the uncached result (the prefix cache does not exist yet)."""
    prompt = list(range(100, 180))
    first = (await complete(cell, prompt=prompt, temperature=0, max_tokens=16))["ids"][0]
    again = (await complete(cell, prompt=prompt, temperature=0, max_tokens=16))["ids"][0]
    longer = (await complete(cell, prompt=prompt + first[:7], temperature=0, max_tokens=9))["ids"][0]
    assert again == first
    assert longer == first[7:]
    assert reference.explain_mismatch(prompt, first) == ""
