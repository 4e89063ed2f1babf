"""What the first rank has the others do, and how that is put into numbers.

An order is a kind, a length and so many numbers behind them, int64. The first `HEAD` numbers go in one message, which
is all of a step of some sequences; what is more follows in a second one.

Design note. The first rank plans, draws and talks to Redis; the others only compute, in the order of its orders. A step
is the very arrays that its own model reads (`StepInputs.pack`). Copies of blocks that are asked for while a step
computes are held back until it is over, since nobody listens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.swap import BlockCopy
from gpu_worker.model.inputs import StepInputs
from gpu_worker.parallel.team import Team

HEAD = 512


class Kind(IntEnum):
    """`STEP`: what `StepInputs.pack` gives. `COPY`: block, host block and direction of each copy. `END`: nothing."""

    END = 0
    STEP = 1
    COPY = 2


class Orders:
    """The first rank's mouth. One thread uses it at a time; RuntimeError: another rank has gone."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._is_computing = False
        self._held: list[BlockCopy] = []

    def step(self, inputs: StepInputs) -> None:
        """Compute a step; `over` tells when it is."""
        self._send_held()
        self._is_computing = True
        self._send(Kind.STEP, inputs.pack())

    def over(self) -> None:
        """The step is over."""
        self._is_computing = False
        self._send_held()

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make these copies, in order, behind the steps so far and in front of the next."""
        self._held += copies
        if not self._is_computing:
            self._send_held()

    def end(self) -> None:
        """There is nothing more to do."""
        self._send(Kind.END, np.empty(0, dtype=np.int64))

    def _send_held(self) -> None:
        copies, self._held = self._held, []
        if copies:
            rows = [(copy.block, copy.host_block, copy.is_back) for copy in copies]
            self._send(Kind.COPY, np.array(rows, dtype=np.int64).ravel())

    def _send(self, kind: Kind, numbers: npt.NDArray[np.int64]) -> None:
        order = np.concatenate((np.array([kind, len(numbers)], dtype=np.int64), numbers))
        head = np.zeros(HEAD, dtype=np.int64)
        head[: len(order)] = order[:HEAD]
        for message in (head, order[HEAD:]):
            if len(message):
                self._team.tell(torch.from_numpy(message))


def hear(team: Team) -> tuple[Kind, npt.NDArray[np.int64]]:
    """The next order, as long as that takes. Raises RuntimeError: the first rank has gone."""
    head = torch.zeros(HEAD, dtype=torch.int64)
    team.tell(head)
    kind, length = head[:2].tolist()
    rest = torch.zeros(max(0, 2 + length - HEAD), dtype=torch.int64)
    if len(rest):
        team.tell(rest)
    return Kind(kind), torch.cat((head, rest))[2 : 2 + length].numpy()


def to_copies(numbers: npt.NDArray[np.int64]) -> list[BlockCopy]:
    """What a `COPY` asks for."""
    return [BlockCopy(block, host, bool(is_back)) for block, host, is_back in numbers.reshape(-1, 3).tolist()]
