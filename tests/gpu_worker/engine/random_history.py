"""Random histories of an engine: sharers of beginnings that come, leave and fail while it runs."""

from __future__ import annotations

import random
from collections.abc import Callable

from gpu_worker.engine.sequence import Sequence
from shared.ids import RequestId
from shared.speculation import SpeculationConfig, parse_speculative_config
from tests.gpu_worker.engine.workload import Driver, make_engine, make_sequence
from tests.scripted_runner import ScriptedRunner, draw_repeating

POISON = 96
BLOCK_SIZE = 4
"""Of the engines here."""


class RandomHistory:
    """An engine with a prefix cache and blocks of `BLOCK_SIZE` tokens, and what happens to it.

    Args:
        rng: of everything that happens.
        num_blocks, budget, window: of the engine.
        take_out: what `rng` does to a request now and then, by the engine.
    """

    def __init__(
        self, rng: random.Random, num_blocks: int, budget: int, *, is_drafting: bool, window: int = 0,
        take_out: Callable[[Driver, RequestId], None],
    ) -> None:  # fmt: skip
        self._rng = rng
        self._take_out = take_out
        runner = ScriptedRunner(num_blocks, BLOCK_SIZE, poison=POISON, draw=draw_repeating, window=window)
        engine = make_engine(
            runner, max_num_seqs=6, max_num_batched_tokens=budget, speculation=_drafts() if is_drafting else None,
            has_prefix_cache=True,
        )  # fmt: skip
        self.driver = Driver(engine, runner, budget=budget, goes_on=lambda: rng.random() < 0.6)
        self.gone: set[str] = set()
        """Requests that were taken out, or failed."""

    def run(self, sequences: list[Sequence]) -> None:
        """All of `sequences` in their order, to the end; those that are not gone as if nothing had happened."""
        rng, engine, waiting = self._rng, self.driver.engine, list(sequences)
        while waiting or engine.has_work:
            while waiting and rng.random() < 0.5:
                engine.add(waiting.pop(0))
            if rng.random() < 0.1:
                name = rng.choice(sequences).request_id
                self.gone.add(name)
                self._take_out(self.driver, name)
            if engine.has_work:
                self.gone.update(request_id for request_id, _ in self.driver.step().failed)
        self.driver.run_until_idle()
        self.driver.assert_as_solo([s for s in sequences if s.request_id not in self.gone])


def make_sharers(
    rng: random.Random, number: int, *, num_samples: tuple[int, ...] = (1,), scopes: tuple[str, ...] = ()
) -> list[Sequence]:
    """The samples of a cut of one of two texts and a few tokens of its own, often so that but one is left to compute
    behind what is found; one in twenty is alone, and as many are of one of `scopes`."""
    text = random.Random(rng.randrange(2)).choices(range(POISON), k=80)
    own = rng.choices(range(POISON), k=rng.choice((1, 1, 1, 5, 20)))
    own += [POISON] if rng.random() < 0.1 else []
    prompt, is_alone = text[: 4 * rng.randrange(21)] + own, rng.random() < 0.05
    scope = (rng.choice(scopes),) if scopes and rng.random() < 0.05 else ()
    priority, max_tokens = rng.randrange(3), rng.randint(1, 15)
    return [
        make_sequence(
            f"r{number:02}", prompt, choice=choice, rank=number, is_alone=is_alone, priority=priority, scope=scope,
            max_tokens=max_tokens, seed=number,
        )
        for choice in range(rng.choice(num_samples))
    ]  # fmt: skip


def _drafts() -> SpeculationConfig | None:
    return parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')
