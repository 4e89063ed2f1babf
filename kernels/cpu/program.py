"""A program: ops over buffers of fixed capacity, run by one call a step.

The C code keeps addresses, not objects: a program holds on to every tensor and struct that it was given, and a pool to
every program that it has run, since a thread that comes late may still look at the last one (pool.c).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from torch import Tensor

from kernels.cpu.build import Isa
from kernels.cpu.ops import ARGUMENTS, Op, OpKind, Step

MAX_OPS = 4096


class Pool:
    """Threads that run programs; whoever waits for one is one of them. One program runs at a time.

    Args:
        library: from `build.load_library`.
        num_threads: in all, the one that waits included.

    Attributes:
        isa: what the library was compiled for.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.num_threads = num_threads
        self.isa = Isa((ctypes.c_char_p.in_dll(library, "isa_name").value or b"").decode())
        self._library = library
        library.pool_open.restype = ctypes.c_void_p
        # A start takes a microsecond or two: giving the interpreter's lock away for it might cost half a millisecond.
        self._start = ctypes.PyDLL(library._name, handle=library._handle).pool_start
        self._start.restype = None
        library.pool_wait.restype = None
        library.pool_close.restype = None
        self._kept: list[Program] = []
        self._is_started = False
        self._handle = ctypes.c_void_p(library.pool_open(num_threads, MAX_OPS))
        if not self._handle:
            raise MemoryError(f"can't start {num_threads} threads for the CPU kernels")

    def start(self, program: Program, step: Step) -> None:
        """Have the other threads begin with all ops for `step`. `step` is copied; what it points to must stay as it is
        until `wait` has returned."""
        assert not self._is_started, "one program at a time"
        self._is_started = True
        if program.pool is not self:
            program.pool = self
            self._kept.append(program)
        ops = program.compiled()
        self._start(self._handle, ops, len(ops), ctypes.byref(step))

    def wait(self) -> None:
        """Take part in what was started until all of it is done; the interpreter's lock is free meanwhile."""
        assert self._is_started, "nothing was started"
        self._library.pool_wait(self._handle)
        self._is_started = False

    def run(self, program: Program, step: Step) -> None:
        """Run all ops for `step`."""
        self.start(program, step)
        self.wait()

    def close(self) -> None:
        """End the threads, when what was started is done."""
        if self._handle:
            if self._is_started:
                self.wait()
            self._library.pool_close(self._handle)
            self._handle = ctypes.c_void_p(None)
            self._kept.clear()

    def __del__(self) -> None:
        self.close()


class Program:
    """Ops in the order they are added.

    Attributes:
        is_of_wanted: whether ops that are added from now on work on the step's wanted rows alone, gathered into
            buffers of their own (`rows.add_gather`).
    """

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.is_of_wanted = False
        self._ops: list[tuple[OpKind, ctypes.Structure, bool]] = []
        self._labels: list[str] = []
        self._kept: list[object] = []
        self._compiled: ctypes.Array[Op] | None = None

    def add(self, kind: OpKind, args: ctypes.Structure, *kept: object, label: str = "") -> None:
        """Append an op.

        Args:
            args: the kind's struct (`ARGUMENTS`).
            kept: tensors whose addresses `args` holds.
            label: what the profile calls it; ops of one label are added up.
        """
        assert isinstance(args, ARGUMENTS[kind])
        assert len(self._ops) < MAX_OPS
        self._ops.append((kind, args, self.is_of_wanted))
        self._labels.append(label or kind.name.lower())
        self._kept += kept
        self._compiled = None

    def copy(self) -> Program:
        """A program of the same ops, to add others to."""
        made = Program()
        made.is_of_wanted = self.is_of_wanted
        made._ops, made._labels, made._kept = list(self._ops), list(self._labels), list(self._kept)
        return made

    def compiled(self) -> ctypes.Array[Op]:
        """The ops as C sees them."""
        if self._compiled is None:
            ops = [
                Op(kind=kind, args=ctypes.addressof(args), is_of_wanted=is_of_wanted)
                for kind, args, is_of_wanted in self._ops
            ]
            self._compiled = (Op * len(ops))(*ops)
        return self._compiled

    def profile(self) -> dict[str, float]:
        """Seconds spent in the ops of each label, over all runs."""
        seconds: dict[str, float] = {}
        for label, op in zip(self._labels, self.compiled(), strict=True):
            seconds[label] = seconds.get(label, 0.0) + op.nanoseconds * 1e-9
        return seconds


def sum_profiles(profiles: Iterable[dict[str, float]]) -> dict[str, float]:
    """Seconds of each label over several programs."""
    total: dict[str, float] = {}
    for profile in profiles:
        for label, seconds in profile.items():
            total[label] = total.get(label, 0.0) + seconds
    return total


def address(tensor: Tensor | None) -> int | None:
    """Where the data of a CPU tensor begins; None for None."""
    return None if tensor is None else tensor.data_ptr()
