"""The first rank's model and host memory: whatever they are to do, the other ranks are told first.

Whatever is raised once the others were told leaves them at another place than this rank, or means that one has gone:
it breaks the engine, so that the worker ends and its requests go elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from torch import Tensor

from gpu_worker.engine.engine import EngineBroken
from gpu_worker.engine.swap import BlockCopy, HostMemory
from gpu_worker.model.assembly import Parts, find_device, load_parts, make_runner
from gpu_worker.model.families import read_config
from gpu_worker.model.inputs import StepInputs
from gpu_worker.model.kv_layout import KvCache
from gpu_worker.model.runner import Decoder, DecoderRunner
from gpu_worker.model.split import Split, check_ranks
from gpu_worker.parallel.orders import Orders
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.team import Team
from shared.config import WorkerConfig

_Result = TypeVar("_Result")


def load_leading_runner(config: WorkerConfig, ranks: Ranks, cards: Sequence[int]) -> DecoderRunner:
    """The runner of the first rank, with the others at work.

    Args:
        ranks: which wait for their places.
        cards: a CUDA device for each rank, the first one current in this thread; empty: there is nothing to choose.

    Raises:
        ConfigError: the model folder, a flag or the memory does not allow it.
    """
    check_ranks(read_config(Path(config.model.model), config.model.model_impl), config.engine)
    seat = ranks.begin(cards)
    team = Team(seat.rank, seat.size, seat.meeting, is_cuda=find_device(config.engine.device).type == "cuda")
    orders = Orders(team)
    parts = lead(load_parts(config, Split(seat.rank, seat.size, team)), orders)
    ranks.say_end = orders.end
    return make_runner(parts, config.engine)


def lead(own: Parts, orders: Orders) -> Parts:
    """The first rank's `own` parts, such that the others do whatever these do."""
    memory = None if own.host_memory is None else LeadingHostMemory(own.host_memory, orders)
    decoder = replace(own.decoder, model=LeadingDecoder(own.decoder.model, orders))
    return replace(own, decoder=decoder, host_memory=memory)


class LeadingDecoder:
    """A `Decoder` over this rank's part of the model."""

    def __init__(self, own: Decoder, orders: Orders) -> None:
        self._own, self._orders = own, orders

    def start_logits(self, inputs: StepInputs, cache: KvCache) -> Callable[[], Tensor]:
        with _Together():
            self._orders.step(inputs)
            return self._finishing(self._own.start_logits(inputs, cache))

    def start_best(self, inputs: StepInputs, cache: KvCache, vocab_size: int) -> Callable[[], list[int]]:
        with _Together():
            self._orders.step(inputs)
            return self._finishing(self._own.start_best(inputs, cache, vocab_size))

    def read_hidden(self, rows: list[int]) -> Tensor:
        return self._own.read_hidden(rows)  # of the sums of all ranks, so that they are whole on each

    def profile(self) -> dict[str, float]:
        return self._own.profile()

    def _finishing(self, wait: Callable[[], _Result]) -> Callable[[], _Result]:
        def finish() -> _Result:
            with _Together():
                result = wait()
                self._orders.over()
            return result

        return finish


class LeadingHostMemory:
    """A `HostMemory` of which each rank has its part."""

    def __init__(self, own: HostMemory, orders: Orders) -> None:
        self._own, self._orders = own, orders

    @property
    def num_blocks(self) -> int:
        """Host blocks there are."""
        return self._own.num_blocks

    @property
    def block_copy_s(self) -> float:
        """What copying this rank's part of a block one way has taken lately, in seconds; 0: not known yet."""
        return self._own.block_copy_s

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make these copies on all ranks."""
        self._orders.copy(copies)
        self._own.copy(copies)


class _Together:
    """What all ranks do; see the module."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            raise EngineBroken(f"the ranks of this worker can't go on together ({error})") from error
