"""Decode steps replayed as CUDA graphs: one launch for a step in which every sequence has one row.

Design note. A graph is a list of kernel launches with fixed arguments. So that it may be replayed for another step,

* inputs lie in the buffers of `StepInputs` on the device, which never move and belong to both sets of them, padded to
  a size that was captured: a padding row has slot −1, and its sequence no rows and no keys, so nothing of it is written
  or read (`kernels.paged_attention`);
* launches are sized by bounds that hold for every step of that size (`BatchExtent`), and the kernels read the true
  lengths from the tensors;
* the logits lie in memory of the graph; the next replay overwrites them.

All sizes are captured when the worker starts, largest first, into one memory pool: graphs never run at once, so that
they share it. A step with a prompt chunk or a draft, or with more sequences than any size, runs as launches.
`--enforce-eager` turns graphs off. Not run on a card yet: the tests replay by calling the recorded function again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.engine.chunks import BatchPlan
from gpu_worker.model.inputs import Padding, StepInputs
from kernels.paged_attention import BatchExtent

MAX_SIZE = 256  # larger steps take so long that their launches no longer count


@dataclass(frozen=True, slots=True)
class Captured:
    """`replay` computes anew into `logits` [size, vocab] float32."""

    replay: Callable[[], object]
    logits: Tensor


Capture = Callable[[Callable[[], Tensor]], Captured]


class DecodeGraphs:
    """The graphs of one worker.

    Args:
        compute: logits [rows, vocab] float32 of all rows of what `inputs` holds.
        max_context: longest sequence. max_total_context: keys of all sequences together, at most.
        capture: records a call of `compute`.
    """

    def __init__(
        self,
        compute: Callable[[], Tensor],
        inputs: StepInputs,
        sizes: Iterable[int],
        *,
        max_context: int,
        max_total_context: int,
        capture: Capture,
    ) -> None:
        self._max_context, self._max_total_context = max_context, max_total_context
        self._graphs: dict[int, Captured] = {}
        for size in sorted(sizes, reverse=True):
            inputs.fill(BatchPlan(()), self._padding(size))
            inputs.send()
            self._graphs[size] = capture(compute)
        self._sizes = sorted(self._graphs)

    def padding_for(self, plan: BatchPlan) -> Padding | None:
        """What makes a step that was captured of `plan`; None when no graph is for such a plan."""
        num_rows = len(plan.chunks)
        size = next((size for size in self._sizes if size >= num_rows), None)
        if size is None or not all(chunk.num_rows == 1 and chunk.is_sampling for chunk in plan.chunks):
            return None
        if sum(chunk.start + 1 for chunk in plan.chunks) > self._max_total_context:
            return None
        return self._padding(size)

    def replay(self, padding: Padding) -> Tensor:
        """Raw logits [padded rows, vocab] of the step that was sent last; valid until the next call."""
        graph = self._graphs[padding.num_sequences]
        graph.replay()
        return graph.logits

    def _padding(self, size: int) -> Padding:
        extent = BatchExtent(
            min_rows=0,
            max_rows=1,
            total_rows=size,
            max_context=self._max_context,
            total_context=min(size * self._max_context, self._max_total_context),
        )
        return Padding(size, extent)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then powers of two and their halfway points, up to `max_num_seqs` itself or `MAX_SIZE`."""
    largest = min(max_num_seqs, MAX_SIZE)
    sizes = {1, 2, 4, 8, largest}
    power = 16
    while power < largest:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return sorted(size for size in sizes if size <= largest)


class CardCapture:
    """Captures on the current CUDA device; all graphs share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Captured:
        """`run`, called once beside the main stream (kernels are compiled, libraries make their workspaces), then
        recorded."""
        main, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(main)
        with torch.cuda.stream(aside):
            run()
        main.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()
        return Captured(graph.replay, logits)
