"""A model runner with the failpoint `worker.in_prefill` before each step that holds prompt tokens."""

from __future__ import annotations

from gpu_worker.engine.batch_plan import DrawnToken, ModelRunner
from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from shared.failpoints import failpoint, is_armed

NUM_MARKER_TOKENS = 4


class ProbedRunner:
    """Passes everything on to `runner`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks = runner.num_blocks
        self.block_size = runner.block_size
        self.key_cost = runner.key_cost
        self.window = runner.window

    def prepare(self, plan: BatchPlan) -> None:
        self._runner.prepare(plan)

    def start(self, plan: BatchPlan) -> None:
        if is_armed("worker.in_prefill"):
            prompts = [chunk for chunk in plan.chunks if chunk.start < chunk.sequence.num_prompt_tokens]
            if prompts:
                failpoint("worker.in_prefill", _detail(plan, prompts))
        self._runner.start(plan)

    def finish(self) -> list[DrawnToken]:
        return self._runner.finish()

    def forget(self, sequence: Sequence) -> None:
        self._runner.forget(sequence)


def _detail(plan: BatchPlan, prompts: list[PlannedChunk]) -> str:
    """All request ids, then the first tokens of each prompt in the step, by which a test can poison one prompt."""
    ids = ",".join(dict.fromkeys(chunk.sequence.request_id for chunk in plan.chunks))
    markers = dict.fromkeys(".".join(map(str, _first_tokens(chunk.sequence))) for chunk in prompts)
    return " ".join([ids, *(f"tok={marker}" for marker in markers)])


def _first_tokens(sequence: Sequence) -> list[int]:
    return sequence.token_ids[: min(NUM_MARKER_TOKENS, sequence.num_prompt_tokens)]
