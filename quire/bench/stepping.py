"""An engine in this very process, stepped and timed: no services, no Redis, nothing between the steps."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_worker.engine.batch_plan import DrawnToken, ModelRunner
from gpu_worker.engine.chunks import BatchPlan
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sequence import Sequence as EngineSequence
from gpu_worker.service import make_engine
from quire.bench.statistics import percentile
from shared import flags
from shared.clock import Clock, MonotonicClock
from shared.config import EngineConfig, WorkerConfig
from shared.ids import RequestId
from shared.messages import SamplingParams
from shared.prefix import new_key

PARTS = ("plan", "inputs", "forward", "sampling", "rest of runner", "start", "keep", "view")
"""Of a step, in their order; what a runner names beside these comes last. A step that only takes the likeliest tokens
has no sampling: that is in forward. Plan and inputs are the next step's, made while the model computes where it can;
forward is what is waited for after that. So ops, which are parts of forward, may take longer than it does."""

NO_STEP_LIMIT_MS = math.inf
"""A bench's `--max-step-ms`: prompts are computed in whole steps, also beside sequences that have theirs. With a
worker's limit the first of a batch would be far beyond the context to measure, or at their end, when the last begin."""


class NullRunner:
    """A model that takes no time: what is left of a step is the engine's bookkeeping."""

    max_model_len = 1 << 20

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.key_cost = 0.0
        self.window = 0
        self._token = DrawnToken(7)
        self._plan = BatchPlan(())

    def prepare(self, plan: BatchPlan) -> None:
        pass

    def start(self, plan: BatchPlan) -> None:
        self._plan = plan

    def finish(self) -> list[DrawnToken]:
        sampling = (chunk for chunk in self._plan.chunks if chunk.is_sampling)
        return [self._token for chunk in sampling for _ in range(1 + len(chunk.draft))]

    def forget(self, sequence: EngineSequence) -> None:
        pass


class TimedRunner:
    """Passes everything on to `runner`; notes how long it took in all, and when it last finished a step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks = runner.num_blocks
        self.block_size = runner.block_size
        self.key_cost = runner.key_cost
        self.window = runner.window
        self.finished_at = self.inside_s = self.inside_s_then = 0.0

    def prepare(self, plan: BatchPlan) -> None:
        with self._inside():
            self._runner.prepare(plan)

    def start(self, plan: BatchPlan) -> None:
        with self._inside():
            self._runner.start(plan)

    def finish(self) -> list[DrawnToken]:
        with self._inside():
            drawn = self._runner.finish()
        self.finished_at, self.inside_s_then = time.perf_counter(), self.inside_s
        return drawn

    def forget(self, sequence: EngineSequence) -> None:
        self._runner.forget(sequence)

    def profile(self) -> dict[str, float]:
        """Seconds by part so far, as far as the runner tells."""
        tell = getattr(self._runner, "profile", None)
        return dict(tell()) if tell is not None else {}

    @contextmanager
    def _inside(self) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.inside_s += time.perf_counter() - since


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """Of some steps: the wall and the processor time (all threads) of each, the mean seconds of each part, and how many
    tokens were drawn, drafted and found right in all of them. A view is made after each step; it belongs to it, since
    the model may compute the next one beside it."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    view_s: tuple[float, ...]
    parts_s: dict[str, float]
    num_drawn: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def median_s(self) -> float:
        return percentile(self.wall_s, 50)

    @property
    def median_cpu_s(self) -> float:
        return percentile(self.cpu_s, 50)

    @property
    def median_view_s(self) -> float:
        return percentile(self.view_s, 50)


def join(several: Sequence[TimedSteps]) -> TimedSteps:
    """Steps of the same kind, timed at several times."""
    names = several[0].parts_s
    return TimedSteps(
        wall_s=tuple(seconds for times in several for seconds in times.wall_s),
        cpu_s=tuple(seconds for times in several for seconds in times.cpu_s),
        view_s=tuple(seconds for times in several for seconds in times.view_s),
        parts_s={name: sum(times.parts_s.get(name, 0.0) for times in several) / len(several) for name in names},
        num_drawn=sum(times.num_drawn for times in several),
    )


class Bench:
    """A worker's engine over `runner`, and ways to time it. It learns what steps cost as it does in a worker, so drafts
    are taken while they pay. It has no prefix cache: what is timed is to be computed.

    Args:
        limits: those of the engine.
        clock: what the engine learns from; None: the machine's.
    """

    def __init__(
        self, runner: ModelRunner, limits: EngineConfig, *, max_model_len: int, clock: Clock | None = None
    ) -> None:
        self._runner = TimedRunner(runner)
        limits = replace(limits, enable_prefix_caching=False)
        self.engine = make_engine(
            self._runner, limits, max_model_len=max_model_len, clock=clock or MonotonicClock(), prefix_key=new_key()
        )

    def add(self, sequences: Iterable[EngineSequence]) -> None:
        """Let the engine take these in."""
        for sequence in sequences:
            self.engine.add(sequence)

    def step_until_drawn(self, sequences: Sequence[EngineSequence]) -> TimedSteps:
        """Compute all prompts: until each of `sequences` has its first token."""
        times = _Recorder(self._runner, self.engine)
        while any(sequence.num_output == 0 for sequence in sequences):
            times.step(_never)
        return times.result()

    def step(self, count: int, *, before_each: Callable[[], None] | None = None) -> TimedSteps:
        """`count` steps, one begun while the one before is kept. `before_each` is not timed; with it, each step begins
        after it."""
        times = _Recorder(self._runner, self.engine)
        for left in range(count - 1, -1, -1):
            if before_each is not None:
                before_each()
            times.step(_never if before_each is not None or left == 0 else _always)
        return times.result()


def _always() -> bool:
    return True


def _never() -> bool:
    return False


class _Recorder:
    def __init__(self, runner: TimedRunner, engine: Engine) -> None:
        self._runner = runner
        self._engine = engine
        self._first = self._last = engine.view()
        self._wall_s: list[float] = []
        self._cpu_s: list[float] = []
        self._view_s: list[float] = []
        self._parts = dict.fromkeys(("plan", "rest of runner", "keep"), 0.0)
        self._before = runner.profile()

    def step(self, goes_on: Callable[[], bool]) -> None:
        runner = self._runner
        cpu_s, began_at, inside_s = time.process_time(), time.perf_counter(), runner.inside_s
        self._engine.step(goes_on)
        viewed_at = time.perf_counter()
        self._last = self._engine.view()
        ended_at = time.perf_counter()
        self._cpu_s.append(time.process_time() - cpu_s)
        self._view_s.append(ended_at - viewed_at)
        self._wall_s.append(ended_at - began_at)
        self._parts["plan"] += runner.finished_at - began_at - (runner.inside_s_then - inside_s)
        self._parts["rest of runner"] += runner.inside_s - inside_s
        self._parts["keep"] += viewed_at - runner.finished_at - (runner.inside_s - runner.inside_s_then)

    def result(self) -> TimedSteps:
        parts = self._parts | {"view": sum(self._view_s)}
        for name, seconds in self._runner.profile().items():
            parts[name] = seconds - self._before.get(name, 0.0)
            if "." not in name:
                parts["rest of runner"] -= parts[name]
        count = max(1, len(self._wall_s))
        means = {name: seconds / count for name, seconds in parts.items()}
        first, last = self._first, self._last
        return TimedSteps(
            wall_s=tuple(self._wall_s),
            cpu_s=tuple(self._cpu_s),
            view_s=tuple(self._view_s),
            parts_s=means,
            num_drawn=last.num_generation_tokens - first.num_generation_tokens,
            num_drafted=last.num_draft_tokens - first.num_draft_tokens,
            num_accepted=last.num_accepted_tokens - first.num_accepted_tokens,
        )


def make_sequence(rank: int, prompt: list[int], *, max_tokens: int) -> EngineSequence:
    """A greedy request of one sequence; the engine takes them in the order of their rank."""
    return EngineSequence(
        request_id=RequestId(f"bench-{rank:06}"),
        attempt=1,
        choice=0,
        rank=rank,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0),
    )


def random_prompts(count: int, length: int, vocab_size: int, period: int = 0) -> list[list[int]]:
    """Prompts of `length` token ids, the same in every run; with a period they repeat after that many."""
    draw = random.Random(length)
    own = min(period, length) or length
    prompts = [[draw.randrange(vocab_size) for _ in range(own)] for _ in range(count)]
    return [(prompt * -(-length // own))[:length] for prompt in prompts]


def worker_config(model: Path, engine_flags: str, *more: str) -> WorkerConfig:
    """What a worker would be started with. Raises `ConfigError` for a wrong flag."""
    argv = [f"--model={model}", *more, *flags.split("--engine-flags", engine_flags)]
    return flags.parse(WorkerConfig, argv, {}, program="python -m gpu_worker")


def describe(times: TimedSteps) -> str:
    """Parts of a step as lines of text, shares of step and view together; parts of parts are indented."""
    total = sum(seconds for name, seconds in times.parts_s.items() if "." not in name)
    lines = [f"  {'part':24}{'µs/step':>12}{'share':>9}"]
    for name in sorted(times.parts_s, key=_place):
        seconds = times.parts_s[name]
        shown = "  " * name.count(".") + name.rpartition(".")[2]
        lines.append(f"  {shown:24}{1e6 * seconds:12.1f}{100 * seconds / max(total, 1e-12):8.1f} %")
    return "\n".join(lines)


def _place(name: str) -> tuple[int, str]:
    top = name.partition(".")[0]
    return PARTS.index(top) if top in PARTS else len(PARTS), name
