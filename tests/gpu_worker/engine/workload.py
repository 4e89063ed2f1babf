"""Sequences for engine tests, and a way to drive an engine while checking its invariants after every step."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

from gpu_worker.engine.engine import Engine, StepOutput
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.swap import HostMemory
from shared.clock import Clock
from shared.ids import RequestId
from shared.log import FinishEntry, TokenEntry
from shared.messages import SamplingParams
from shared.speculation import SpeculationConfig
from tests.scripted_runner import VOCAB_SIZE, ScriptedRunner, solo_output

MAX_MODEL_LEN = 256


def make_sequence(
    name: str = "a", prompt: list[int] | None = None, *, choice: int = 0, rank: int = 0, is_alone: bool = False,
    priority: int = 0, scope: tuple[str, ...] = (), **sampling: object,
) -> Sequence:  # fmt: skip
    """A sequence of request `name` with a short prompt and, unless told otherwise, 8 tokens to draw."""
    prompt = [1, 2, 3, 4, 5] if prompt is None else prompt
    params = SamplingParams(**{"seed": 7, "max_tokens": 8, **sampling})  # type: ignore[arg-type]
    return Sequence(
        request_id=RequestId(name), attempt=1, choice=choice, rank=rank, token_ids=prompt,
        num_prompt_tokens=len(prompt), sampling=params, is_alone=is_alone,
        priority=priority, cache_scope=scope,
    )  # fmt: skip


def make_random_sequence(rng: random.Random, number: int, *, max_tokens: int = 40, is_long: bool = False) -> Sequence:
    """One of many; some end by a stop token, all have their own seed; `is_long`: none has a lower limit."""
    limit = max_tokens if is_long else rng.randint(1, max_tokens)
    return make_sequence(
        f"r{number}", [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))], rank=number,
        seed=rng.randrange(2**31), max_tokens=limit, min_tokens=rng.choice((0, 0, 5)),
        stop_token_ids=rng.choice(((), (3, 5))),
    )  # fmt: skip


def make_engine(
    runner: ScriptedRunner, *, max_num_seqs: int = 64, max_num_batched_tokens: int = 64,
    speculation: SpeculationConfig | None = None, clock: Clock | None = None, has_prefix_cache: bool = False,
    is_chunking: bool = True,
    reserved_tokens: int = 0,
    is_static: bool = False,
    host_memory: HostMemory | None = None,
    preemption_mode: str = "auto",
) -> Engine:  # fmt: skip
    return Engine(
        runner,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        speculation=speculation,
        clock=clock,
        has_prefix_cache=has_prefix_cache,
        is_chunking=is_chunking,
        reserved_tokens=reserved_tokens,
        is_static=is_static,
        host_memory=host_memory,
        preemption_mode=preemption_mode,
        window=0 if is_static or reserved_tokens else runner.window,
    )


class Driver:
    """Steps an engine, keeps what every choice gained, and checks the promises that hold after any step.

    Args:
        goes_on: for `Engine.step`.
    """

    def __init__(
        self, engine: Engine, runner: ScriptedRunner, *, budget: int = 64, goes_on: Callable[[], bool] | None = None
    ) -> None:
        self.goes_on = goes_on
        self.engine = engine
        self.runner = runner
        self.budget = budget
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finish: dict[tuple[str, int], str] = {}

    def step(self) -> StepOutput:
        output = self.engine.step(self.goes_on)
        self.engine.check_integrity()
        assert self.runner.plans[-1].num_tokens <= self.budget
        for new in output.entries:
            self._take(new.request_id, new.choice, new.entries, new.finish)
        return output

    def run_until_idle(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        view = self.engine.view()
        assert not self.engine.has_work, "the engine should come to an end"
        assert not self.runner.is_computing
        assert (view.free_blocks, view.num_running, view.num_waiting) == (self.runner.num_blocks, 0, 0)
        assert view.running == {}
        assert self.runner.num_rows == 0, "every sequence that ran should have been forgotten"

    def assert_as_solo(self, sequences: list[Sequence]) -> None:
        """Each of these ended, with the tokens and reason of a run that nothing disturbed."""
        for s in sequences:
            key = (s.request_id, s.choice)
            prompt = s.token_ids[: s.num_prompt_tokens]
            expected = solo_output(prompt, s.choice, s.sampling, MAX_MODEL_LEN, self.runner.draw)
            assert (self.tokens[key], self.finish.get(key)) == expected, key

    def _take(self, request_id: str, choice: int, entries: tuple[object, ...], finish: str) -> None:
        key = (request_id, choice)
        assert key not in self.finish, "nothing follows a finish"
        for entry in entries:
            if isinstance(entry, TokenEntry):
                self.tokens[key].append(entry.token_id)
            else:
                assert isinstance(entry, FinishEntry)
                assert entry == FinishEntry(choice, finish)
                self.finish[key] = finish
