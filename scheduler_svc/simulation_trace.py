"""What goes into a simulation and what comes out of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shared.ids import RequestId, WorkerId
from shared.messages import SubmitRequest

Party = tuple[str, int]
"""Tenant and priority: those who share with each other are the tenants of one priority."""


@dataclass(frozen=True, slots=True)
class SimulatedPrefix:
    """What prompts of one tenant that bring number `number` begin with: `num_tokens` tokens, the same for all."""

    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One arrival. `output_len` tokens end each choice by itself (at most `max_tokens`). `prompt_len` counts the tokens
    of its `prefix`, too."""

    arrival_s: float
    prompt_len: int
    max_tokens: int
    output_len: int
    n: int = 1
    cancel_s: float | None = None
    timeout_s: float = 600.0
    priority: int = 0
    tenant: str = "t"
    user: str = ""
    prefix: SimulatedPrefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorkerSpec:
    """One worker start, and maybe its death (as by kill -9). `num_swap_blocks` fit into its host memory;
    `preemption_mode` is one of `shared/preemption.py`. Without a prefix cache all of each prompt is computed."""

    num_blocks: int
    block_size: int = 16
    num_swap_blocks: int = 0
    preemption_mode: str = "auto"
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    has_prefix_cache: bool = False
    start_s: float = 0.0
    death_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds: a step takes `step_s` + `token_s` for each of its tokens + `block_copy_s` for each block copied to host
    memory or back before it (nothing overlaps); messages are under way for a delay.

    A worker reports after a step in which what it holds has changed, or as the engine's does by time: after
    `busy_report_s` while something waits in it or when running sequences have taken an eighth of what was free, after
    `calm_report_s` else, and after `idle_report_s` with nothing to do.
    """

    step_s: float = 0.02
    token_s: float = 0.001
    block_copy_s: float = 0.001
    report_delay_s: float = 0.005
    inbox_delay_s: float = 0.002
    busy_report_s: float = 0.1
    calm_report_s: float = 0.5
    idle_report_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The cell at one moment. Blocks are those of living workers;
    `num_workers` counts those that are starting, too. `served` are tokens (prompts and outputs) since the
    beginning, `queued` requests that wait for a dispatch."""

    now_s: float
    used_blocks: int
    num_blocks: int
    num_workers: int
    num_running: int
    served: dict[Party, int]
    queued: dict[Party, int]


def party_of(summary: SubmitRequest) -> Party:
    """Whose request it is, and of which class."""
    return summary.tenant, summary.priority


@dataclass(slots=True)
class SimulationResult:
    """What happened. Times are seconds of the simulation; `dispatched` holds (request, worker) in order.

    `start_s` is when a sequence of the request was first admitted inside a worker. `num_swapped_out` and
    `num_swapped_in` are blocks. `num_tokens` were drawn and `num_computed` computed; of the `num_queried` tokens of
    sequences when they were admitted `num_found` lay in prefix caches. `samples` are taken at each watch.
    """

    ended: dict[RequestId, str] = field(default_factory=dict)
    start_s: dict[RequestId, float] = field(default_factory=dict)
    first_token_s: dict[RequestId, float] = field(default_factory=dict)
    end_s: dict[RequestId, float] = field(default_factory=dict)
    dispatched: list[tuple[RequestId, WorkerId]] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    num_evictions: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    num_queried: int = 0
    num_found: int = 0
    served: Counter[Party] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
