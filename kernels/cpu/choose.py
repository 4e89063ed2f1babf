"""Choosing tokens from logits as one op of the CPU kernels; what the filters mean stands in kernels/sampling.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.ops import ChooseArgs, OpKind, Step
from kernels.cpu.program import Pool, Program, address


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRules:
    """How each of up to `capacity` rows is chosen from, in buffers that stay where they are.

    Attributes:
        temperatures, min_p, top_p: float32. top_k: int64, 0: all. Temperature 0: the likeliest token.
        seeds, choices, positions: int64, what the row's random number is made of.
    """

    temperatures: Tensor
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    seeds: Tensor
    choices: Tensor
    positions: Tensor


def make_rules(capacity: int) -> ChoiceRules:
    """Rules for `capacity` rows, all to take the likeliest token."""
    floats = {name: torch.zeros(capacity) for name in ("temperatures", "min_p", "top_p")}
    numbers = ("top_k", "seeds", "choices", "positions")
    return ChoiceRules(**floats, **{name: torch.zeros(capacity, dtype=torch.int64) for name in numbers})


class Chooser:
    """Chooses tokens on a pool's threads.

    Args:
        capacity: most rows at once.
    """

    def __init__(self, pool: Pool, capacity: int) -> None:
        self.rules = make_rules(capacity)
        self._pool = pool
        self._out = torch.zeros(capacity, dtype=torch.int64)
        self._programs: dict[tuple[int, int, int], Program] = {}

    def choose(self, logits: Tensor) -> Tensor:
        """Token ids [rows] int64, valid until the next call; row i by the rules of row i.

        Args:
            logits: [rows, vocab] float32, a row consecutive; always of the same few buffers.
        """
        key = (logits.data_ptr(), logits.shape[1], logits.stride(0))
        if key not in self._programs:
            self._programs[key] = self._make_program(logits)
        self._pool.run(self._programs[key], Step(num_wanted=len(logits)))
        return self._out[: len(logits)]

    def _make_program(self, logits: Tensor) -> Program:
        rules, program = self.rules, Program()
        args = ChooseArgs(
            logits=address(logits),
            width=logits.shape[1],
            stride=logits.stride(0),
            temperatures=address(rules.temperatures),
            min_p=address(rules.min_p),
            top_p=address(rules.top_p),
            top_k=address(rules.top_k),
            seeds=address(rules.seeds),
            choices=address(rules.choices),
            positions=address(rules.positions),
            out=address(self._out),
        )
        program.add(OpKind.CHOOSE, args, logits, rules, self._out)
        return program
