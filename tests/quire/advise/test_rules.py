"""The rules of `quire advise`, each on a snapshot that calls for it and on one that just does not.

Those on a GPU's memory are tried here only, on snapshots made by hand: no card was at hand. The others are provoked on
live cells in `test_live_advice.py` as far as a small model on a CPU can show them.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from quire.advise.rules import RULES, advise, open_questions
from quire.advise.snapshot import Snapshot, WorkerSettings
from shared import flags
from shared.config import ServeConfig
from shared.speculation import parse_speculative_config

GOOD_SETTINGS = WorkerSettings(
    device="cpu", dtype="bfloat16", quantization="int8", batching="continuous", kv_layout="paged",
    kv_cache_dtype="auto", has_prefix_cache=True, has_drafts=False, block_size=16, gpu_memory_utilization=0.9,
    max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=2048, max_step_ms=150, num_swap_blocks=0,
    sliding_window=0, preemption_mode="auto", num_threads=2,
)  # fmt: skip
GOOD = Snapshot(
    settings=GOOD_SETTINGS, seconds=10, num_workers=1, num_running=20, num_waiting=0, num_blocks=1000, usage=0.85,
    slot_utilization=0.98, most_running=32, most_blocks_used=900, num_prefix_queries=50_000, num_prefix_hits=20_000,
    worker_seconds=9.5, num_ended=100, mean_prompt=400, mean_output=200, num_ttft=100, ttft_s=0.3, num_tpot=100,
    tpot_s=0.03,
)  # fmt: skip
ON_A_CARD = {"device": "cuda", "quantization": "none"}
SHORT_OF_BLOCKS = {"num_waiting": 5, "usage": 0.97}


def change(**values: object) -> Snapshot:
    """`GOOD` with other values, in the snapshot or its settings."""
    own = {field.name for field in fields(Snapshot)}
    settings = {name: value for name, value in values.items() if name not in own}
    return replace(
        GOOD,
        settings=replace(GOOD_SETTINGS, **settings),  # type: ignore[arg-type]
        **{name: value for name, value in values.items() if name in own},  # type: ignore[arg-type]
    )


def test_a_system_in_order_hears_nothing() -> None:
    """Where no threshold is passed there should be no advice, on a CPU and on a GPU."""
    assert advise(GOOD) == []
    assert advise(change(**ON_A_CARD)) == []


CASES: dict[str, tuple[str, dict[str, object], dict[str, object], tuple[str, ...]]] = {
    # name: rule, what provokes it, what does not quite, flags
    "prefix off": ("prefix-cache-off", {"has_prefix_cache": False}, {"has_prefix_cache": None},
                   ("--enable-prefix-caching",)),
    "prefix cold": ("prefix-cache-cold", {"num_prefix_hits": 499}, {"num_prefix_hits": 500}, ()),
    "too few to tell": ("prefix-cache-cold", {"num_prefix_hits": 0, "num_prefix_queries": 2000},
                        {"num_prefix_hits": 0, "num_prefix_queries": 1999}, ()),
    "short": ("block-size", {"mean_prompt": 56}, {"mean_prompt": 57}, ("--block-size=8",)),
    "long": ("block-size", {"mean_prompt": 1848}, {"mean_prompt": 1847}, ("--block-size=32",)),
    "fragmented": ("block-size", {"slot_utilization": 0.94, "block_size": 64},
                   {"slot_utilization": 0.96, "block_size": 64}, ("--block-size=32",)),
    "few blocks tell nothing": ("block-size", {"slot_utilization": 0.5, "usage": 0.008},
                                {"slot_utilization": 0.5, "usage": 0.007}, ("--block-size=8",)),
    "card unused": ("memory-utilization", {**ON_A_CARD, **SHORT_OF_BLOCKS, "gpu_memory_utilization": 0.84,
                                           "kv_cache_dtype": "int8"},
                    {**SHORT_OF_BLOCKS, "gpu_memory_utilization": 0.84, "kv_cache_dtype": "int8"},
                    ("--gpu-memory-utilization=0.9",)),
    "card crowded": ("memory-utilization", {**ON_A_CARD, **SHORT_OF_BLOCKS, "kv_cache_dtype": "int8"},
                     {**ON_A_CARD, **SHORT_OF_BLOCKS, "usage": 0.89, "kv_cache_dtype": "int8"},
                     ("--gpu-memory-utilization=0.95",)),
    "card too full": ("memory-utilization", {**ON_A_CARD, "gpu_memory_utilization": 0.96, "most_blocks_used": 700},
                      {**ON_A_CARD, "gpu_memory_utilization": 0.96}, ("--gpu-memory-utilization=0.9",)),
    "weights fill the card": ("memory-utilization", {**ON_A_CARD, "num_blocks": 500},
                              {**ON_A_CARD, "num_blocks": 512}, ("--gpu-memory-utilization=0.8",)),
    "KV quantization": ("kv-quantization", SHORT_OF_BLOCKS, {**SHORT_OF_BLOCKS, "kv_cache_dtype": "fp8"},
                        ("--kv-cache-dtype=int8",)),
    "preemptions": ("preemptions", {"num_preemptions": 1, "kv_cache_dtype": "int8"},
                    {"num_preemptions": 1, "num_ended": 101, "kv_cache_dtype": "int8"}, ("--max-model-len=2048",)),
    "static": ("baseline", {"batching": "static"}, {}, ("--batching=continuous",)),
    "contiguous": ("baseline", {"kv_layout": "contiguous"}, {}, ("--kv-layout=paged",)),
    "batch limit": ("batch-limit", {"num_running": 32, "num_waiting": 1, "usage": 0.3},
                    {"num_running": 32, "num_waiting": 1, "usage": 0.8}, ("--max-num-seqs=64",)),
    "idle blocks": ("idle-blocks", {"num_running": 10, "num_waiting": 1, "usage": 0.79},
                    {"num_running": 10, "num_waiting": 1, "usage": 0.8}, ("--admission-headroom=16",)),
    "idle slots": ("idle-blocks", {"num_running": 25, "num_waiting": 1, "usage": 0.5},
                   {"num_running": 26, "num_waiting": 1, "usage": 0.5}, ("--admission-headroom=16",)),
    "scheduling": ("scheduling-cost", {"num_running": 32, "num_waiting": 1, "worker_seconds": 6.9},
                   {"num_running": 32, "num_waiting": 1, "worker_seconds": 7.0}, ("--num-threads=1",)),
    "scheduling, many": ("scheduling-cost", {"num_waiting": 1, "worker_seconds": 1, "max_num_seqs": 256},
                         {"num_waiting": 1, "worker_seconds": 1, "max_num_seqs": 256, "seconds": 0},
                         ("--max-num-seqs=128",)),
    "scheduling, no time known": ("scheduling-cost", {"num_running": 32, "num_waiting": 1, "worker_seconds": 0.1},
                                  {"num_running": 32, "num_waiting": 1, "worker_seconds": 0.0}, ("--num-threads=1",)),
    "scheduling, one thread": ("scheduling-cost", {"num_waiting": 1, "worker_seconds": 1, "num_threads": 4},
                               {"num_waiting": 1, "worker_seconds": 1, "num_threads": 1}, ("--num-threads=3",)),
    "budget, small": ("token-budget", {"max_num_batched_tokens": 512, "ttft_s": 0.51, "mean_prompt": 600},
                      {"max_num_batched_tokens": 512, "ttft_s": 0.5, "mean_prompt": 600},
                      ("--max-num-batched-tokens=2048",)),
    "budget, large": ("token-budget", {"max_num_batched_tokens": 8192, "tpot_s": 0.051},
                      {"max_num_batched_tokens": 8192, "tpot_s": 0.05}, ("--max-num-batched-tokens=4096",)),
    "TTFT, queue": ("ttft", {"ttft_s": 0.501, "num_waiting": 1}, {"ttft_s": 0.5, "num_waiting": 1}, ("--workers=2",)),
    "TTFT, compute": ("ttft", {"ttft_s": 0.501}, {"ttft_s": 0.501, "num_ttft": 2}, ()),
    "TPOT": ("tpot", {"tpot_s": 0.051, "quantization": "none"}, {"tpot_s": 0.05, "quantization": "none"},
             ("--quantization=int8",)),
    "TPOT, lone": ("tpot", {"tpot_s": 0.051, "num_running": 1}, {"tpot_s": 0.05, "num_running": 1}, ("--speculative",)),
    "TPOT, many": ("tpot", {"tpot_s": 0.051}, {"tpot_s": 0.051, "num_tpot": 2}, ("--max-num-seqs=16",)),
    "TPOT, one slot": ("tpot", {"tpot_s": 0.051, "max_num_seqs": 1}, {"tpot_s": 0.05, "max_num_seqs": 1}, ()),
    "TPOT, other target": ("tpot", {"tpot_s": 0.02, "max_tpot_s": 0.01}, {"tpot_s": 0.01, "max_tpot_s": 0.01},
                           ("--max-num-seqs=16",)),
    "TTFT, other target": ("ttft", {"ttft_s": 0.2, "max_ttft_s": 0.1}, {"ttft_s": 0.1, "max_ttft_s": 0.1}, ()),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "bad", "good", "wanted"), CASES.values(), ids=CASES)
def test_each_rule_speaks_past_its_threshold(
    rule: str, bad: dict[str, object], good: dict[str, object], wanted: tuple[str, ...]
) -> None:
    """A rule should say what to set just past its threshold, and nothing just before it."""
    found = {advice.rule: advice for advice in advise(change(**bad))}
    assert rule in found
    for flag in wanted:
        assert any(given.startswith(flag) for given in found[rule].flags), found[rule].flags
    assert bool(wanted) == bool(found[rule].flags)
    assert rule not in {advice.rule for advice in advise(change(**good))}


@pytest.mark.parametrize(("_rule", "bad", "_good", "_wanted"), CASES.values(), ids=CASES)
def test_what_is_advised_can_be_set(
    _rule: str, bad: dict[str, object], _good: dict[str, object], _wanted: tuple[str, ...]
) -> None:
    """Every flag should be one of `quire serve` with a value that it takes, and each advice say what was seen and how
    its gain is known."""
    for advice in advise(change(**bad)):
        config = flags.parse(ServeConfig, list(advice.flags), {}, program="quire serve")
        parse_speculative_config(config.engine.speculative_config)
        config.engine.check_swap()
        assert advice.seen
        assert advice.gain.startswith(("measured in ", "expected, not measured", "by arithmetic", "not known", "fewer"))


def test_the_first_to_try_come_first() -> None:
    """Prefix caching, then blocks and memory, then KV quantization, then the rest; in each the largest gain first."""
    bad = change(has_prefix_cache=False, mean_prompt=20, mean_output=20, **SHORT_OF_BLOCKS, num_preemptions=50,
                 batching="static", tpot_s=0.2)  # fmt: skip
    rules = [advice.rule for advice in advise(bad)]
    assert rules == ["prefix-cache-off", "baseline", "block-size", "kv-quantization", "tpot", "preemptions"]


def test_unknown_settings_are_not_guessed() -> None:
    """Where workers do not say how they are set, rules on settings should be silent and the answer say so."""
    unknown = replace(GOOD, settings=WorkerSettings(), mean_prompt=20, num_waiting=5, usage=0.97)
    assert advise(unknown) == []
    slow = replace(unknown, worker_seconds=1, tpot_s=1, num_preemptions=50, usage=0.1)
    assert [(advice.rule, advice.flags) for advice in advise(slow)] == [("tpot", ()), ("preemptions", ())]
    assert "do not say how they are set" in open_questions(unknown)[0]
    assert len(open_questions(replace(GOOD, num_ended=0, num_waiting=0))) == 2
    assert open_questions(replace(GOOD, num_waiting=1)) == []


SWAP = ("--swap-space=4",)


@pytest.mark.parametrize(("settings", "wanted"), [
    ({}, SWAP),
    ({"preemption_mode": "recompute"}, (*SWAP, "--preemption-mode=auto")),
    ({"num_swap_blocks": 8}, ()),
    ({"sliding_window": 4096}, ()),
    ({"sliding_window": None}, ()),
    ({"num_swap_blocks": None}, ()),
    ({"batching": "static"}, ()),
    ({"kv_layout": "contiguous"}, ()),
])  # fmt: skip
def test_swap_is_advised_only_where_a_worker_starts_with_it(settings: dict[str, object], wanted: object) -> None:
    """Not where a window frees blocks, nor in what is there to compare with: there workers refuse it; nor where it is
    there, or is not known to be missing. It should do something where it is set."""
    found = advise(change(num_preemptions=9, kv_cache_dtype="int8", max_model_len=600, **settings))
    assert [advice.flags for advice in found if advice.rule == "preemptions"] == [wanted]


def test_dear_scheduling_and_few_slots_do_not_contradict() -> None:
    """With all slots taken and little time in steps, who follows the advice should never be told to go back."""
    slots = 256
    for _ in range(8):
        full = change(max_num_seqs=slots, num_running=slots, num_waiting=9, usage=0.1, worker_seconds=2, num_threads=1)
        flags = [flag for advice in advise(full) for flag in advice.flags if flag.startswith("--max-num-seqs=")]
        if not flags:
            break
        (flag,) = flags
        slots = int(flag.partition("=")[2])
    assert slots == 64
    few = change(max_num_seqs=2, num_running=2, num_waiting=9, usage=0.1, worker_seconds=2)
    assert "--max-num-seqs=16" in [flag for advice in advise(few) for flag in advice.flags]


def test_every_rule_is_tried() -> None:
    """No rule should be without a case here, nor without a place in the operators' page."""
    from tests.test_architecture import ROOT

    page = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    tried = {case[0] for case in CASES.values()}
    assert len(RULES) == len(tried)
    assert all(f"`{rule}`" in page for rule in tried)
