"""How the ranks of a worker meet, and what they give each other while they compute.

Design note.

* They meet through a file without a name that the first rank hands down to the others (`ranks.py`): nobody else can
  join, nothing is left behind however they end, and two workers of a machine share neither a port nor a folder. Gloo's
  own connections are on the loopback address, on ports that the system chooses.
* Two groups: one for orders and agreements, in which a rank may wait for days, and one for sums, in which nobody waits
  longer than `STEP_LIMIT_S`: who does has lost another rank, even one that is frozen.
* On a CPU addends are gathered and added up in the order of the ranks, in float32: all ranks have the same bits, and an
  element's do not depend on where in the step it lies, as they do where Gloo adds up (with three ranks or more, another
  order for each part of the array). On CUDA NCCL adds up, in the dtype of the model.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from shared.errors import ConfigError

STEP_LIMIT_S = 60.0
"""As long as `--worker-stall-s` by default: by then the scheduler has given up a worker that makes no step."""
_dist: Any = torch.distributed  # its stubs lack most of what is used here
_ORDER_LIMIT = timedelta(days=365)


class Team:
    """Rank `rank` of `size`; returns when all have come. An `Exchange` (`model/split.py`).

    Every method is called by all ranks, in the same order, and raises RuntimeError when another rank has gone.

    Args:
        meeting: file descriptor of an empty file, the same one for all.
        is_cuda: what is added up and joined lies on the current CUDA device.

    Raises:
        ConfigError: torch has no way to communicate.
    """

    def __init__(self, rank: int, size: int, meeting: int, *, is_cuda: bool) -> None:
        if not _dist.is_available() or not (_dist.is_nccl_available() if is_cuda else _dist.is_gloo_available()):
            backend = "NCCL" if is_cuda else "Gloo"
            raise ConfigError(
                f"--tensor-parallel-size={size}: this build of torch has no {backend}; install one that has"
            )
        self.rank, self.size, self._is_cuda = rank, size, is_cuda
        file = _dist.FileStore(f"/proc/self/fd/{meeting}", size)
        self._orders = _gloo(_dist.PrefixStore("orders", file), rank, size, _ORDER_LIMIT)
        sums, limit = _dist.PrefixStore("sums", file), timedelta(seconds=STEP_LIMIT_S)
        self._sums = _nccl(sums, rank, size, limit) if is_cuda else _gloo(sums, rank, size, limit)

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in its dtype; `x` may be overwritten."""
        if self._is_cuda:
            self._sums.allreduce([x]).wait()
            return x
        first, *others = self._gather(x)
        total = first.float()
        for addend in others:
            total += addend
        return total.to(x.dtype)

    def join(self, x: Tensor) -> Tensor:
        """On the first rank the `x` of all, [rows, size] each, side by side; on the others their own."""
        if x.numel() == 0:
            return x.new_empty((len(x), self.size * x.shape[1]))
        if self._is_cuda:
            return torch.cat(self._gather(x), dim=1)
        parts = list(x.new_empty((self.size, *x.shape))) if self.rank == 0 else []
        places = [[_bytes(part) for part in parts]] if parts else []
        self._sums.gather(places, [_bytes(x.contiguous())], _dist.GatherOptions()).wait()
        return torch.cat(parts, dim=1) if parts else x

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        answer = torch.tensor([number])
        options = _dist.AllreduceOptions()
        options.reduceOp = _dist.ReduceOp.MIN
        self._orders.allreduce([answer], options).wait()
        return int(answer)

    def tell(self, numbers: Tensor) -> None:
        """Fill the others' `numbers`, of the same shape on the CPU, with those of the first rank."""
        self._orders.broadcast([numbers], _dist.BroadcastOptions()).wait()

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = x.new_empty((self.size, *x.shape))
        self._sums._allgather_base(_bytes(parts), _bytes(x.contiguous())).wait()
        return list(parts)


def _bytes(x: Tensor) -> Tensor:
    """`x` as bytes, in the same memory: every backend moves those."""
    return x.flatten().view(torch.uint8)


def _gloo(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._timeout = limit
    options._threads = 1  # a rank does one thing at a time
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return _dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return _dist.ProcessGroupNCCL(store, rank, size, options)
