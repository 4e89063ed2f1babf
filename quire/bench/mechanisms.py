"""What `quire bench ablation` switches: each mechanism's flags off and on, the traffic that shows it, and the aims.

`published` is what accounts of these mechanisms on GPUs report; the aims are for on / off in one run here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BATCH = 16
MAX_MODEL_LEN = 2048
MOST_SEQUENCES = 128
"""In the batch where capacities are compared: memory is to be what limits them."""
CACHE_BYTES = 64 << 20
"""Of the KV cache where capacities are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """on / off should be at most (at least, where higher is better) `ratio`; with `is_absolute` the figure itself that
    the mechanism has."""

    ratio: float
    is_higher_better: bool = False
    is_absolute: bool = False

    def is_met(self, off: float, on: float) -> bool:
        """Whether a pair of figures reaches it."""
        reached = on if self.is_absolute else ratio_of(off, on)
        return reached >= self.ratio if self.is_higher_better else reached <= self.ratio

    def __str__(self) -> str:
        return f"{'≥' if self.is_higher_better else '≤'} {self.ratio:.3g}{' on' if self.is_absolute else ''}"


def ratio_of(off: float, on: float) -> float:
    """on / off; NaN where off is nothing."""
    return on / off if off else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`key` of what was measured of a side (`ablation.py`)."""

    label: str
    key: str
    unit: str
    published: str = "–"
    aim: Aim | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """`workload` empty: nothing is sent, capacities are compared. `num_kv_tokens`: both sides have a KV cache of so
    many tokens in bfloat16; 0: of the default size. `concurrency`: so many requests at a time; None: all
    at once."""

    name: str
    what: str
    off: tuple[str, ...]
    on: tuple[str, ...]
    workload: str
    figures: tuple[Figure, ...]
    num_kv_tokens: int = 0
    concurrency: int | None = None


def _paged(num_sequences: int, figures: tuple[Figure, ...], workload: str = "w2") -> Mechanism:
    both = (f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-seqs={MOST_SEQUENCES}", "--no-enable-prefix-caching")
    return Mechanism(
        name=f"paged-{num_sequences}" + (f"-{workload}" if workload != "w2" else ""),
        what=f"KV in blocks, not {MAX_MODEL_LEN:,} tokens reserved for each; memory for {num_sequences} of those; "
        + workload,
        off=("--kv-layout=contiguous", *both),
        on=("--kv-layout=paged", *both),
        workload=workload,
        figures=figures,
        num_kv_tokens=num_sequences * MAX_MODEL_LEN,
    )


def _prefix(num_shared: int) -> Mechanism:
    published = num_shared == 200
    return Mechanism(
        name=f"prefix-{num_shared}",
        what=f"prefix cache: {num_shared} shared and 50 own tokens in, 50 out, 16 at once, the prefix known",
        off=("--no-enable-prefix-caching",),
        on=("--enable-prefix-caching",),
        workload=f"prefix-{num_shared}",
        figures=(
            Figure(label="TTFT, median", key="ttft_ms_p50", unit="ms", published="−68 %" if published else "–",
                   aim=Aim(ratio=0.32)),
            Figure(label="KV blocks in use, most", key="most_blocks_used", unit="blocks",
                   published="−66 %" if published else "–", aim=Aim(ratio=0.34)),
            Figure(label="wall", key="wall_s", unit="s"),
        ),
    )  # fmt: skip


def _kv_dtype(dtype: str) -> Mechanism:
    return Mechanism(
        name=f"kv-{dtype}",
        what=f"keys and values in {dtype} instead of bfloat16, {CACHE_BYTES >> 20} MiB of cache",
        off=("--kv-cache-dtype=bf16", f"--kv-cache-memory-bytes={CACHE_BYTES}"),
        on=(f"--kv-cache-dtype={dtype}", f"--kv-cache-memory-bytes={CACHE_BYTES}"),
        workload="",
        figures=(
            Figure(label="tokens that fit", key="kv_tokens", unit="tokens", published="−50 % to −75 % of memory",
                   aim=Aim(ratio=1.9, is_higher_better=True)),
        ),
    )  # fmt: skip


def _block(size: int, workload: str, num_kv_tokens: int) -> Mechanism:
    return Mechanism(
        name=f"block-{size}-{workload}",
        what=f"blocks of {size} tokens, not of 16; {workload} requests, memory for {num_kv_tokens:,} tokens",
        off=("--block-size=16", "--no-enable-prefix-caching"),
        on=(f"--block-size={size}", "--no-enable-prefix-caching"),
        workload=workload,
        figures=(
            Figure(label="output", key="output_tokens_per_s", unit="tokens/s", published="16 as balance"),
            Figure(label="slots of used blocks with a token", key="live_of_used", unit=""),
            Figure(label="sequences at the same time, most", key="most_running", unit=""),
        ),
        num_kv_tokens=num_kv_tokens,
    )


def _preemption(other: str) -> Mechanism:
    """w2 in memory for a fifth of it, of which admission keeps nothing free: who runs is preempted all the time."""
    both = ("--swap-space=1", "--admission-headroom=0", "--no-enable-prefix-caching")
    return Mechanism(
        name=f"auto-{other}",
        what=f"who gives way goes to host memory or computes again, whichever is cheaper, not always {other}; w2",
        off=(f"--preemption-mode={other}", *both),
        on=("--preemption-mode=auto", *both),
        workload="w2",
        figures=(
            Figure(label="output", key="output_tokens_per_s", unit="tokens/s",
                   aim=Aim(ratio=0.95, is_higher_better=True)),
            Figure(label="sequences preempted", key="num_preemptions", unit=""),
        ),
        num_kv_tokens=2048,
    )  # fmt: skip


def _concurrency(published: str, ratio: float) -> Figure:
    aim = Aim(ratio=ratio, is_higher_better=True)
    return Figure(
        label="sequences at the same time, most", key="most_running", unit="", published=published, aim=aim
    )  # fmt: skip


MECHANISMS: dict[str, Mechanism] = {
    m.name: m
    for m in (
        _paged(4, (_concurrency("4 × (4 to 17 ×)", 4),)),
        _paged(4, (_concurrency("4 × (4 to 17 ×)", 8),), "lengths"),
        _paged(
            4,
            (
                Figure(
                    label="slots of used blocks with a token",
                    key="live_of_used",
                    unit="",
                    published="60–68 → 94–98 %",
                    aim=Aim(ratio=0.96, is_higher_better=True, is_absolute=True),
                ),
                Figure(label="slots of all blocks with a token", key="live_of_all", unit=""),
            ),
            "full",
        ),
        _paged(
            2,
            (
                Figure(
                    label="output",
                    key="output_tokens_per_s",
                    unit="tokens/s",
                    published="3.2 ×",
                    aim=Aim(ratio=3.2, is_higher_better=True),
                ),
                Figure(label="TTFT, median", key="ttft_ms_p50", unit="ms", published="−50 %", aim=Aim(ratio=0.5)),
            ),
        ),
        Mechanism(
            name="continuous-batching",
            what=f"who has ended makes room at the next step, not with the last of a batch; {BATCH} at a time",
            off=("--batching=static", f"--max-num-seqs={BATCH}"),
            on=("--batching=continuous", f"--max-num-seqs={BATCH}"),
            workload="mixed",
            figures=(
                Figure(
                    label="requests",
                    key="requests_per_s",
                    unit="1/s",
                    published="2.8 × (15 → 42)",
                    aim=Aim(ratio=2.8, is_higher_better=True),
                ),
                Figure(
                    label="latency, P95", key="latency_ms_p95", unit="ms", published="3.2 → 1.8 s", aim=Aim(ratio=0.55)
                ),
                Figure(
                    label="rows that are live",
                    key="live_rows",
                    unit="",
                    published="45 → 92 %",
                    aim=Aim(ratio=2, is_higher_better=True),
                ),
            ),
            concurrency=BATCH,
        ),
        _prefix(200),
        _prefix(1500),
        Mechanism(
            name="chunked-prefill",
            what="prompts cut into chunks: eight streams, then a prompt of 2,048 tokens",
            off=("--no-enable-chunked-prefill",),
            on=("--enable-chunked-prefill",),
            workload="w4",
            figures=(
                Figure(label="longest stall of a stream", key="longest_stall_ms", unit="ms", aim=Aim(ratio=1 / 8)),
                Figure(label="TTFT of the long prompt", key="long_ttft_ms", unit="ms", aim=Aim(ratio=1.15)),
            ),
        ),
        _kv_dtype("int8"),
        _kv_dtype("fp8"),
        _preemption("recompute"),
        _preemption("swap"),
        _block(8, "short", 1024),
        _block(32, "short", 1024),
        _block(8, "long", 4096),
        _block(32, "long", 4096),
    )
}
