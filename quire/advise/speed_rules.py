"""Rules on time: who waits for a slot, for a first token, for the next one, and for the scheduler itself.

As `memory_rules.py`: each takes a snapshot to an advice, or to None.
"""

from __future__ import annotations

from quire.advise.advice import Advice, Group
from quire.advise.memory_rules import LOW_USAGE
from quire.advise.snapshot import Snapshot

MIN_COUNT = 3
"""Requests that a mean time must be of."""
MIN_BUDGET, MAX_BUDGET = 2_048, 4_096
MAX_SLOTS = 256
LOW_BUSY = 0.7
"""Share of a loaded worker's time that is spent in steps; less is lost between them."""
MANY_SLOTS = 64
DRAFTS = (
    '--speculative-config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, '
    '"prompt_lookup_min": 2}'
)


def comparison_baselines(s: Snapshot) -> Advice | None:
    """Two settings exist to compare with only."""
    if s.settings.batching == "static":
        flag, gain, factor = "--batching=continuous", "requests/s × 3.07, P95 of latency × 0.63", 3.07
    elif s.settings.kv_layout == "contiguous":
        flag, gain, factor = "--kv-layout=paged", "7.5 times the sequences in the same memory", 7.5
    else:
        return None
    return Advice(
        rule="baseline",
        group=Group.BLOCKS_AND_MEMORY,
        title="The workers run a baseline that is there to compare with",
        flags=(flag,),
        seen=f"--batching={s.settings.batching}, --kv-layout={s.settings.kv_layout}",
        gain=f"measured in docs/performance.md: {gain}",
        factor=factor,
    )


def is_at_batch_limit(s: Snapshot) -> bool:
    """Requests wait for slots while blocks are free."""
    return s.num_slots > 0 and s.num_waiting >= 1 and s.num_running >= s.num_slots and s.usage < LOW_USAGE


def batch_limit(s: Snapshot) -> Advice | None:
    """Few slots make scheduling dear, too: the same work between steps for fewer tokens. Many do so as well, so where
    it is dear there is no more to be had than `MANY_SLOTS`."""
    now, most = s.settings.max_num_seqs, MANY_SLOTS if is_scheduling_costly(s) else MAX_SLOTS
    if not is_at_batch_limit(s) or now >= most:
        return None
    by_blocks = now * LOW_USAGE / max(s.usage, 1 / MAX_SLOTS)
    wanted = min(most, max(2 * now, 2 ** int(by_blocks).bit_length() // 2))
    return Advice(
        rule="batch-limit",
        group=Group.OTHER,
        title=f"All {s.num_slots} slots are taken while blocks are free: let more run at once",
        flags=(f"--max-num-seqs={wanted}",),
        seen=f"{s.num_waiting:.0f} requests wait beside {s.num_running:.0f} that run, {s.usage:.0%} of blocks in use",
        gain="measured in docs/performance.md: 1.8 times the tokens/s with fourteen sequences a step instead of two on "
        "2 cores; more where a step waits for memory. Each token of a stream takes somewhat longer",
        factor=1.8,
    )


def idle_blocks(s: Snapshot) -> Advice | None:
    """Neither slots nor blocks are what is missing; that of many slots a few are free for a moment says nothing."""
    if s.num_waiting < 1 or s.usage >= LOW_USAGE or s.num_running >= LOW_USAGE * s.num_slots:
        return None
    return Advice(
        rule="idle-blocks",
        group=Group.BLOCKS_AND_MEMORY,
        title="Requests wait while slots and blocks are free: let admission count on less growth",
        flags=("--admission-headroom=16",),
        seen=f"{s.num_waiting:.0f} wait; {s.num_running:.0f} of {s.num_slots} slots and {s.usage:.0%} of blocks in use",
        gain=f"expected, not measured: up to {1 / max(s.usage, 0.1):.1f} times as many sequences at once. If prompts "
        "are large beside the cache, waiting is right: then more memory (--kv-cache-memory-bytes) is what helps",
        factor=1.1,
    )


def is_scheduling_costly(s: Snapshot) -> bool:
    """Not where no time of steps is known."""
    return s.worker_seconds > 0 and s.num_running >= 1 and s.num_waiting >= 1 and 0 < _busy(s) < LOW_BUSY


def scheduling_cost(s: Snapshot) -> Advice | None:
    many = s.settings.max_num_seqs > MANY_SLOTS
    if not is_scheduling_costly(s) or not s.num_slots or (is_at_batch_limit(s) and batch_limit(s) is not None):
        return None
    if many:
        flag, why = f"--max-num-seqs={max(MANY_SLOTS, s.settings.max_num_seqs // 2)}", "let fewer run at once"
    elif s.settings.num_threads > 1:
        flag, why = f"--num-threads={s.settings.num_threads - 1}", "leave a core to scheduler, gateway and Redis"
    else:
        return None  # it has no more than one
    return Advice(
        rule="scheduling-cost",
        group=Group.OTHER,
        title=f"Workers spend {1 - _busy(s):.0%} of their time between steps: {why}",
        flags=(flag,),
        seen=f"{s.worker_seconds:.1f} s of steps in {s.seconds:.0f} s on {s.num_workers} workers, while "
        f"{s.num_waiting:.0f} requests waited",
        gain=f"expected, not measured: at most {1 / max(_busy(s), 0.1):.1f} times the tokens/s",
        factor=1.0 / max(_busy(s), 0.1),
    )


def token_budget(s: Snapshot) -> Advice | None:
    """How much of prompts a step takes."""
    budget = s.settings.max_num_batched_tokens
    if not budget:
        return None
    if budget < MIN_BUDGET and _is_slow_to_begin(s) and s.mean_prompt > budget:
        wanted, seen = MIN_BUDGET, f"prompts of {s.mean_prompt:.0f} tokens, first token after {s.ttft_s * 1e3:.0f} ms"
        gain = "expected, not measured: fewer steps a prompt, each of which reads the weights anew; beside running "
        gain += "streams a step still takes only what fits into --max-step-ms"
    elif budget > MAX_BUDGET and _is_slow_to_go_on(s):
        wanted, seen = MAX_BUDGET, f"a token takes {s.tpot_s * 1e3:.0f} ms"
        gain = "expected, not measured: prompts hold up streams for a shorter time"
    else:
        return None
    return Advice(
        rule="token-budget",
        group=Group.OTHER,
        title=f"--max-num-batched-tokens={budget}: set {wanted}",
        flags=(f"--max-num-batched-tokens={wanted}",),
        seen=seen,
        gain=gain,
        factor=1.3,
    )


def first_token(s: Snapshot) -> Advice | None:
    """What is left to do when neither slots nor the token budget explain it."""
    if not _is_slow_to_begin(s) or is_at_batch_limit(s) or token_budget(s) is not None:
        return None
    queued = s.num_waiting >= 1
    flags = ("--workers=" + str(s.num_workers + 1),) if queued else ()
    way = (
        "requests wait in the queue: more workers (--workers, or --autoscale), "
        "or a limit at the door (--max-num-queued-reqs) that refuses at once what would wait"
        if queued
        else "prompts take that long to compute: share their beginnings (prefix caching), or, on a CPU without AMX, "
        "--quantization int8"
    )
    return Advice(
        rule="ttft",
        group=Group.OTHER,
        title=f"The first token takes {s.ttft_s * 1e3:.0f} ms, more than {s.max_ttft_s * 1e3:.0f}",
        flags=flags,
        seen=f"mean of {s.num_ttft:.0f} requests; {s.num_waiting:.0f} wait now",
        gain=f"expected, not measured: {way}",
        factor=1.5,
    )


def next_token(s: Snapshot) -> Advice | None:
    if not _is_slow_to_go_on(s):
        return None
    half, gain = s.settings.max_num_seqs // 2, "expected, not measured: fewer sequences a step"
    flags = (f"--max-num-seqs={half}",) if half else ()
    if s.settings.device == "cpu" and s.settings.quantization == "none":
        flags = ("--quantization=int8",)
        gain = "measured in README (q05b, w1): 13.4 ms a token instead of 28.2 with int8 weights, 11.0 with int4"
    elif s.settings.has_drafts is False and s.num_running <= MIN_COUNT:
        flags = (DRAFTS,)
        gain = "measured in docs/performance.md: 2.1 to 3.3 times as fast where text repeats itself, nothing elsewhere"
    return Advice(
        rule="tpot",
        group=Group.OTHER,
        title=f"A token takes {s.tpot_s * 1e3:.0f} ms, more than {s.max_tpot_s * 1e3:.0f}",
        flags=flags,
        seen=f"mean of {s.num_tpot:.0f} requests, {s.num_running:.0f} running",
        gain=f"{gain}. If prompts come in between, a lower --max-step-ms shortens the stalls",
        factor=2.0,
    )


def _busy(s: Snapshot) -> float:
    """Share of the workers' time in steps; 0: not known."""
    return min(1.0, s.worker_seconds / (s.seconds * s.num_workers)) if s.seconds else 0.0


def _is_slow_to_begin(s: Snapshot) -> bool:
    return s.num_ttft >= MIN_COUNT and s.ttft_s > s.max_ttft_s


def _is_slow_to_go_on(s: Snapshot) -> bool:
    return s.num_tpot >= MIN_COUNT and s.tpot_s > s.max_tpot_s
