"""Advice on live cells: set them badly, load them, hear what to set, set that, and hear no more of it.

Three cells follow each other, each set as the one before was told to be, and badly in other ways: what a small model on
a CPU can show of prefix caching, block size, slots, admission, threads and times. Two more have a cache that is too
small. What is slow is set by the tests, since a small model is not. A GPU's memory is tried on a snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from quire.advise.rules import advise
from quire.advise.snapshot import Snapshot, WorkerSettings
from tests.e2e.cell import Cell
from tests.e2e.conftest import SMALL
from tests.quire.advise.live import (
    Document,
    Load,
    complete,
    flags_of,
    hear,
    rules_of,
    sharing,
    strange,
)

pytestmark = pytest.mark.slow

StartCell = Callable[..., Cell]
Heard = dict[str, Document]

CHAT = Load(clients=24, body=lambda i: complete(sharing(i, 60), 180))
STRANGERS = Load(clients=6, body=lambda i: complete(strange(i, 200), 4))
ENDS = list(range(100, 116))
EARLY = Load(clients=24, body=lambda i: complete(sharing(i, 60), 3000, stop_token_ids=ENDS, temperature=1, seed=i))
"""They might take 3,000 tokens, and end after 32 on average."""
HASTE = Load(clients=100, body=lambda i: complete(sharing(i, 60), 4))
CROWD = Load(clients=80, body=lambda i: complete(sharing(i, 60), 60))
FULL = Load(clients=16, body=lambda i: complete(strange(i, 150), 90))

FIRST_RULES = ("prefix-cache-off", "baseline", "block-size", "token-budget", "batch-limit")
FIRST = ("--no-enable-prefix-caching", "--batching=static", "--block-size=64", "--max-num-batched-tokens=32",
         "--max-num-seqs=2")  # fmt: skip
SECOND = ("--max-num-seqs=64", "--admission-headroom=4000", "--num-threads=2", "--quantization=int8")
"""It was told to take twice as many as two: as often as it takes, and more than that."""
THIRD = ("--quantization=int8", "--max-num-seqs=8")
"""It was told to take half of 64: as often as it takes."""


@contextmanager
def run_cell(model: Path, folder: Path, *flags: str) -> Iterator[Cell]:
    cell = Cell(model, folder, *SMALL, *flags)
    try:
        yield cell
    finally:
        cell.close()


@pytest.fixture(scope="module")
def first(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Heard:
    """What a cell hears that is set badly in five ways."""
    with run_cell(model_folder, tmp_path_factory.mktemp("first"), *FIRST) as cell:
        return {"chat": asyncio.run(hear(cell, CHAT, "--ttft-target-ms=1", speak=FIRST_RULES))}


@pytest.fixture(scope="module")
def second(first: Heard, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Heard:
    """What one hears that has done as it was told, and keeps too much for growth, has no thread to spare and steps of
    many sequences."""
    flags, cured = (*flags_of(first["chat"], *FIRST_RULES), *SECOND), [*FIRST_RULES, "ttft", "prefix-cache-cold"]

    async def listen(cell: Cell) -> Heard:
        return {
            "strangers": await hear(cell, STRANGERS, speak=["prefix-cache-cold"]),
            "chat": await hear(cell, CHAT, half_of(first["chat"], "ttft"), rest=cured, until=finds_prefixes),
            "early": await hear(cell, EARLY, speak=["idle-blocks"], until=runs_hardly_any),
            "haste": await hear(cell, HASTE, speak=["scheduling-cost"], seconds=0.3),
            "crowd": await hear(cell, CROWD, "--tpot-target-ms=0.1", speak=["tpot"], until=is_crowded),
        }

    with run_cell(model_folder, tmp_path_factory.mktemp("second"), *flags) as cell:
        return asyncio.run(listen(cell))


@pytest.fixture(scope="module")
def third(first: Heard, second: Heard, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Heard:
    """What one hears that has done as both were told."""
    flags = [*flags_of(first["chat"], *FIRST_RULES), *flags_of(second["early"], "idle-blocks")]
    flags += flags_of(second["haste"], "scheduling-cost")

    async def listen(cell: Cell) -> Heard:
        return {
            "early": await hear(cell, EARLY, rest=["idle-blocks"]),
            "haste": await hear(cell, HASTE, rest=["scheduling-cost"], seconds=0.3),
            "crowd": await hear(cell, CROWD, half_of(second["crowd"], "tpot"), rest=["tpot"]),
        }

    with run_cell(model_folder, tmp_path_factory.mktemp("third"), *flags, *THIRD) as cell:
        return asyncio.run(listen(cell))


def finds_prefixes(document: Document) -> bool:
    """Whether a third of the tokens that were looked up in the time were found."""
    return document["snapshot"]["num_prefix_hits"] > 0.3 * document["snapshot"]["num_prefix_queries"]


def runs_hardly_any(document: Document) -> bool:
    """Whether two at most run: those of the load before are gone from the gauges."""
    return document["snapshot"]["num_running"] <= 2


def is_crowded(document: Document) -> bool:
    """Whether more than half of 64 slots are taken, and some requests ended while they were."""
    return document["snapshot"]["num_running"] > 32 and document["snapshot"]["num_tpot"] >= 20


def half_of(document: Document, time: str, share: float = 0.5) -> str:
    """The flag that aims at half of what a time was, or another share of that."""
    return f"--{time}-target-ms={document['snapshot'][f'{time}_s'] * 1e3 * share}"


def test_prefixes_blocks_slots_budget_and_baseline(first: Heard, second: Heard) -> None:
    """Without prefix cache, with static batches of two in large blocks and small steps a cell should hear of all five;
    when it has done as it was told of none of them, find prefixes, waste less of its blocks, run more at once and give
    first tokens in less than half of the time."""
    assert [a["rule"] for a in first["chat"]["advice"] if a["rule"] in FIRST_RULES] == [
        "prefix-cache-off", "baseline", "block-size", "batch-limit", "token-budget",
    ]  # fmt: skip
    assert {
        "--enable-prefix-caching", "--batching=continuous", "--block-size=8", "--max-num-batched-tokens=2048",
    } < set(flags_of(first["chat"], *FIRST_RULES))  # fmt: skip
    assert not rules_of(second["chat"]) & {*FIRST_RULES, "ttft"}
    before, after = first["chat"]["snapshot"], second["chat"]["snapshot"]
    assert finds_prefixes(second["chat"])
    assert before["most_running"] == 2
    assert after["most_running"] > 4
    assert after["slot_utilization"] > before["slot_utilization"]


def test_prefixes_that_do_not_repeat(second: Heard) -> None:
    """Prompts that have nothing in common should be told so; when they begin alike they should hear it no more."""
    assert "prefix-cache-cold" in rules_of(second["strangers"])
    assert "prefix-cache-cold" not in rules_of(second["chat"])
    assert second["strangers"]["snapshot"]["num_prefix_hits"] < 0.01 * second["chat"]["snapshot"]["num_prefix_hits"]


def test_idle_blocks(second: Heard, third: Heard) -> None:
    """A cell that keeps blocks for 4,000 tokens of growth should hear that they are idle; with what it is told it
    should run several where it ran one."""
    assert flags_of(second["early"], "idle-blocks") == ["--admission-headroom=16"]
    assert "idle-blocks" not in rules_of(third["early"])
    assert second["early"]["snapshot"]["num_running"] <= 2
    assert third["early"]["snapshot"]["most_running"] >= 5


def test_scheduling_cost(second: Heard, third: Heard) -> None:
    """A worker that waits for the rest of the system should hear that it takes its cores, until it leaves one."""
    assert flags_of(second["haste"], "scheduling-cost") == ["--num-threads=1"]
    assert "scheduling-cost" not in rules_of(third["haste"])


def test_tokens_that_take_long(second: Heard, third: Heard) -> None:
    """Where many sequences share a step, and weights are quantized, fewer should be advised, and tokens take less than
    half of the time with an eighth of them."""
    assert flags_of(second["crowd"], "tpot") == ["--max-num-seqs=32"]
    assert "tpot" not in rules_of(third["crowd"])
    assert third["crowd"]["snapshot"]["num_tpot"] >= 3


async def test_a_full_cache(start_cell: StartCell, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache that is too small for what runs should be told of by preemptions, KV dtype and what first tokens wait
    for; in int8 and with another worker, nothing should be preempted and first tokens come sooner."""
    rules, tight = ("kv-quantization", "preemptions", "ttft"), ("--kv-cache-memory-bytes=655360", "--max-model-len=500")
    cell = start_cell(*tight)
    bad = await hear(cell, FULL, "--ttft-target-ms=1", speak=rules, until=lambda heard: flags_of(heard, "ttft") != [])
    cell.close()
    assert rules_of(bad).issuperset(rules)
    flags = flags_of(bad, "kv-quantization", "ttft")
    assert sorted(flags) == ["--kv-cache-dtype=int8", "--workers=2"]
    assert "--swap-space=4" in flags_of(bad, "preemptions")
    cell = start_cell(*tight, *flags)
    good = await hear(cell, FULL, half_of(bad, "ttft", 0.75), rest=rules)
    assert not rules_of(good).intersection(rules)
    assert good["snapshot"]["num_preemptions"] == 0
    assert good["snapshot"]["num_blocks"] > 4 * 655360 / 16384
    _try_memory_utilization(bad, capsys)


def _try_memory_utilization(bad: Document, capsys: pytest.CaptureFixture[str]) -> None:
    """What the live cell said, as if it had been a card's; more of this in `test_rules.py`."""
    with capsys.disabled():
        print("\nmemory-utilization is tried on a snapshot: --gpu-memory-utilization sizes the cache of a card only")
    assert "memory-utilization" not in rules_of(bad)
    on_cpu = Snapshot(**bad["snapshot"] | {"settings": WorkerSettings(**bad["snapshot"]["settings"])})
    on_a_card = replace(on_cpu, settings=replace(on_cpu.settings, device="cuda", gpu_memory_utilization=0.5))
    (found,) = [advice for advice in advise(on_a_card) if advice.rule == "memory-utilization"]
    assert found.flags == ("--gpu-memory-utilization=0.9",)
    done = replace(on_a_card, num_preemptions=0, num_waiting=0, usage=0.5)
    done = replace(done, settings=replace(done.settings, gpu_memory_utilization=0.9))
    assert "memory-utilization" not in {advice.rule for advice in advise(done)}
