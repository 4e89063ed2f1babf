"""Host memory for KV blocks of sequences that gave way, and the copies there and back.

Design note. When a copy may be made is the engine's business (`engine/swap.py`); here is how.

* A host block holds one block id of all layers, [layers, a layer's block], in the cache's own order and with whatever
  lies in it: scales of quantized caches go with their numbers, and bits come back as they went.
* On a CPU copies are made when they are asked for, by the engine's thread: before a step, or beside the threads that
  compute one. The memory is taken page by page, as it is first written.
* On a GPU host memory is pinned, and each copy goes over blocks on the card, a few in each direction. The stream that
  computes gathers into them and scatters from them, at the speed of the card's memory; a stream of its own moves what
  lies there: on the way out beside the next step, on the way back beside the one that computes when it is asked for.
  Each stream waits for the other where it must, and the engine's thread for neither. Not run on a card yet: the tests
  have a queue that does all at once in place of the streams.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.engine.swap import BlockCopy
from gpu_worker.model.kv_layout import KvCache
from kernels.kv_copy import kv_copy

NUM_STAGED = 16
"""Blocks on the card in each direction, of 2 MiB for a model of 8 billion parameters. A guess, not measured yet."""
KEPT_SHARE = 0.9
"""Of what copies have cost when the next ones are counted: half of the mean is from the last seven or so."""

Pairs = list[tuple[int, int]]
"""Block of the cache and host block."""


class CopyRate:
    """What copying a block one way has taken lately: `block_s` in seconds, 0 before the first one."""

    def __init__(self) -> None:
        self.block_s = 0.0
        self._num_blocks = self._seconds = 0.0

    def note(self, num_blocks: int, seconds: float) -> None:
        """So many blocks took so long."""
        self._num_blocks = KEPT_SHARE * self._num_blocks + num_blocks
        self._seconds = KEPT_SHARE * self._seconds + seconds
        self.block_s = self._seconds / self._num_blocks


class CpuHostMemory:
    """A `HostMemory` beside a cache in the memory of the CPU.

    Args:
        host: from `KvLayout.allocate_host`.
    """

    def __init__(self, cache: KvCache, host: Tensor) -> None:
        # numpy copies in this one thread: those of torch's would meet the pool's that computes.
        self._layers = [_words(cache.blocks(layer), 1) for layer in range(cache.num_layers)]
        self._host = _words(host, 2)
        self._rate = CopyRate()

    @property
    def num_blocks(self) -> int:
        """Host blocks there are."""
        return len(self._host)

    @property
    def block_copy_s(self) -> float:
        """What copying a block one way has taken lately, in seconds; 0: not known yet."""
        return self._rate.block_s

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make these copies, in order."""
        since = time.perf_counter()
        for is_back, pairs in _runs(copies):
            blocks, hosts = (np.array(ids) for ids in zip(*pairs, strict=True))
            for layer, cached in enumerate(self._layers):
                if is_back:
                    cached[blocks] = self._host[hosts, layer]
                else:
                    self._host[hosts, layer] = cached[blocks]
        self._rate.note(len(copies), time.perf_counter() - since)


class Streams(Protocol):
    """Two queues of a card: the current one, which computes, and one beside it."""

    def beside(self) -> AbstractContextManager[object]:
        """Within it the queue beside is the current one."""
        ...

    def mark(self) -> Any:
        """What is behind all that was queued on the current one so far."""
        ...

    def wait(self, mark: Any) -> None:
        """What is queued on the current one from now on comes after `mark`."""
        ...

    def seconds(self, since: Any, mark: Any) -> float | None:
        """From one mark to the other; None while the second is still to come."""
        ...

    def send(self, ids: list[int]) -> Tensor:
        """[ids] int64 on the card, behind what is queued on the current one."""
        ...


class CudaStreams:
    """`Streams` of the current CUDA device."""

    def __init__(self) -> None:
        self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._beside)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def seconds(self, since: Any, mark: Any) -> float | None:
        return since.elapsed_time(mark) / 1000 if mark.query() else None

    def send(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids).pin_memory().to("cuda", non_blocking=True)


class CardHostMemory:
    """A `HostMemory` beside a cache on a card.

    Args:
        host: pinned, from `KvLayout.allocate_host`.
    """

    def __init__(self, cache: KvCache, host: Tensor, streams: Streams, *, num_staged: int = NUM_STAGED) -> None:
        self._cache, self._host, self._streams = cache, host, streams
        self._rate = CopyRate()
        shape = (min(num_staged, len(host)), *host.shape[1:])
        self._leaving, self._coming = (torch.zeros(shape, dtype=host.dtype, device=cache.device) for _ in range(2))
        self._leaving_is_free: Any = streams.mark()
        self._coming_is_free: Any = streams.mark()
        self._moves = deque[tuple[int, Any, Any]]()

    @property
    def num_blocks(self) -> int:
        """Host blocks there are."""
        return int(self._host.shape[0])

    @property
    def block_copy_s(self) -> float:
        """What moving a block one way has taken lately, in seconds; 0: not known yet."""
        while self._moves:
            num_blocks, since, mark = self._moves[0]
            seconds = self._streams.seconds(since, mark)
            if seconds is None:
                break
            self._rate.note(num_blocks, seconds)
            self._moves.popleft()
        return self._rate.block_s

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Queue these copies, in order, between the last step that was started and the next."""
        size = len(self._leaving)
        with torch.inference_mode():
            for is_back, pairs in _runs(copies):
                for first in range(0, len(pairs), size):
                    piece = pairs[first : first + size]
                    self._bring_back(piece) if is_back else self._put_away(piece)

    def _put_away(self, pairs: Pairs) -> None:
        streams = self._streams
        streams.wait(self._leaving_is_free)
        blocks, places = streams.send([block for block, _ in pairs]), streams.send(list(range(len(pairs))))
        for layer in range(self._cache.num_layers):
            kv_copy(self._cache.blocks(layer), self._leaving[:, layer], blocks, places)
        gathered = streams.mark()
        with streams.beside():
            streams.wait(gathered)
            since = streams.mark()
            for place, (_, host) in enumerate(pairs):
                self._host[host].copy_(self._leaving[place], non_blocking=True)
            self._leaving_is_free = streams.mark()
        self._moves.append((len(pairs), since, self._leaving_is_free))

    def _bring_back(self, pairs: Pairs) -> None:
        streams = self._streams
        with streams.beside():  # behind the way out of the same host blocks, which went through this queue, too
            streams.wait(self._coming_is_free)
            since = streams.mark()
            for place, (_, host) in enumerate(pairs):
                self._coming[place].copy_(self._host[host], non_blocking=True)
            moved = streams.mark()
        self._moves.append((len(pairs), since, moved))
        streams.wait(moved)
        blocks, places = streams.send([block for block, _ in pairs]), streams.send(list(range(len(pairs))))
        for layer in range(self._cache.num_layers):
            kv_copy(self._coming[:, layer], self._cache.blocks(layer), places, blocks)
        self._coming_is_free = streams.mark()


def _runs(copies: Sequence[BlockCopy]) -> Iterator[tuple[bool, Pairs]]:
    """Copies one way, that may be made in any order, one such run after another. Of several into one block, whose
    sequences left in between, the last one counts."""
    for is_back, run in groupby(copies, key=lambda copy: copy.is_back):
        last = {copy.block if is_back else copy.host_block: (copy.block, copy.host_block) for copy in run}
        yield is_back, list(last.values())


def _words(tensor: Tensor, num_dims: int) -> npt.NDArray[np.generic]:
    """`tensor` with all dimensions from `num_dims` on as one, of the largest numbers that fill it: a view."""
    rows = tensor.flatten(num_dims)
    row_bytes = rows.shape[-1] * rows.itemsize
    word = next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % dtype.itemsize == 0
    )
    return rows.view(word).numpy()
