"""The compiled CPU kernels and threads to run them; tests that need them are skipped where they can't be built."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.build import CpuKernelsUnavailable, Isa, build, check_machine
from kernels.cpu.ops import Step
from kernels.cpu.program import Pool, Program, address
from kernels.cpu.rows import quantized_bytes
from kernels.quantized_linear import GROUP

FLAGS_VARIABLE = "QUIRE_TEST_KERNEL_FLAGS"
"""Further compiler flags: test_sanitizers.py runs these tests again with them."""


class Machine:
    """Runs programs on pools of 1, 2 and 3 threads.

    Attributes:
        library: the compiled kernels.
        pools: by number of threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.pools = {num_threads: Pool(library, num_threads) for num_threads in (1, 2, 3)}

    def run(
        self,
        add: Callable[[Program], None],
        num_rows: int,
        *,
        threads: int = 1,
        wanted_rows: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        """Run the program that `add` makes for a step of `num_rows` rows; all are wanted unless said."""
        program = Program()
        add(program)
        wanted = torch.arange(num_rows) if wanted_rows is None else wanted_rows
        step = Step(
            num_rows=num_rows,
            num_wanted=len(wanted),
            wanted_rows=address(wanted),
            token_ids=address(token_ids),
        )
        self.pools[threads].run(program, step)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


@pytest.fixture(scope="session", params=list(Isa), ids=lambda isa: isa.value)
def machine(request: pytest.FixtureRequest, kernels_folder: Path) -> Iterator[Machine]:
    flags = tuple(os.environ.get(FLAGS_VARIABLE, "").split())
    try:
        check_machine(request.param)
        library = ctypes.CDLL(str(build(kernels_folder, request.param, flags).path))
    except CpuKernelsUnavailable as error:
        pytest.skip(str(error))
    made = Machine(library)
    yield made
    made.close()


def quantized_rows(values: Tensor) -> Tensor:
    """int8 [rows, width] as the kernels' quantized rows (ops.h), made without them; what must not matter is noise."""
    rows, width = values.shape
    padded = -(-width // 64) * 64
    made = torch.randint(-128, 128, (rows, quantized_bytes(width)), dtype=torch.int8)
    made[:, :padded] = F.pad(values, (0, padded - width))
    groups = F.pad(values.int(), (0, -width % GROUP)).unflatten(1, (-1, GROUP)).sum(dim=2, dtype=torch.int32)
    starts = torch.cat((-128 * groups.sum(dim=1, keepdim=True, dtype=torch.int32), -8 * groups), dim=1)
    made[:, padded : padded + 4 * starts.shape[1]] = starts.view(torch.int8)
    return made
