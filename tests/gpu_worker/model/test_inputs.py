"""The flat arrays of a step."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.inputs import PADDING_SLOT, StepCapacity, StepInputs
from tests.gpu_worker.model.plans import make_sequence


def make_inputs() -> StepInputs:
    capacity = StepCapacity(max_tokens=16, max_sequences=3, max_wanted=6, max_blocks=4, block_size=4)
    return StepInputs(capacity, torch.device("cpu"))


def test_rows_follow_the_plan() -> None:
    """Tokens, positions and slots should follow the chunks, and only sampling chunks want their last row."""
    inputs = make_inputs()
    first = make_sequence(list(range(100, 110)), block_ids=[7, 2, 9])
    second = make_sequence([1, 2, 3], block_ids=[5])
    inputs.fill(BatchPlan((PlannedChunk(first, 3, 6, is_sampling=False), PlannedChunk(second, 2, 1, is_sampling=True))))
    assert inputs.token_ids.tolist() == [103, 104, 105, 106, 107, 108, 3]
    assert inputs.positions.tolist() == [3, 4, 5, 6, 7, 8, 2]
    assert inputs.slots.tolist() == [31, 8, 9, 10, 11, 36, 22]
    assert inputs.wanted_rows.tolist() == [6]
    assert inputs.batch.chunks() == [(0, 6, 9), (6, 1, 3)]
    assert inputs.batch.block_tables[0, :3].tolist() == [7, 2, 9]


def test_a_draft_follows_its_sequence() -> None:
    """Tokens of a draft should lie behind the known ones, with positions and slots of their own, and all their rows
    should be wanted, too."""
    inputs = make_inputs()
    first = make_sequence(list(range(100, 107)), block_ids=[7, 2, 9])
    second = make_sequence([1, 2, 3], block_ids=[5])
    draft = PlannedChunk(first, 6, 1, is_sampling=True, draft=(50, 51))
    inputs.fill(BatchPlan((draft, PlannedChunk(second, 0, 3, is_sampling=True))))
    assert inputs.token_ids.tolist() == [106, 50, 51, 1, 2, 3]
    assert inputs.positions.tolist() == [6, 7, 8, 0, 1, 2]
    assert inputs.slots.tolist() == [10, 11, 36, 20, 21, 22]
    assert inputs.wanted_rows.tolist() == [0, 1, 2, 5]
    assert inputs.batch.chunks() == [(0, 3, 9), (3, 3, 3)]


def test_rows_past_the_plan_are_padding() -> None:
    """A smaller step after a larger one should leave no slot of it behind, in the same buffers."""
    inputs = make_inputs()
    sequence = make_sequence(list(range(12)), block_ids=[0, 1, 2])
    inputs.fill(BatchPlan((PlannedChunk(sequence, 0, 12, is_sampling=True),)))
    address = inputs.slots.data_ptr()
    inputs.fill(BatchPlan((PlannedChunk(sequence, 0, 2, is_sampling=False),)))
    assert inputs.slots.data_ptr() == address
    assert inputs.whole["slots"].tolist() == [0, 1] + [PADDING_SLOT] * 14
    assert inputs.wanted_rows.numel() == 0


def test_too_large_a_plan_is_an_error_of_ours() -> None:
    """Capacity and blocks are the engine's promise; breaking it should not pass silently."""
    sequence = make_sequence(list(range(20)), block_ids=[0, 1])
    with pytest.raises(AssertionError, match="max_num_batched_tokens"):
        make_inputs().fill(BatchPlan((PlannedChunk(sequence, 0, 17, is_sampling=False),)))
    with pytest.raises(AssertionError, match="without blocks"):
        make_inputs().fill(BatchPlan((PlannedChunk(sequence, 0, 9, is_sampling=False),)))


def test_tables_follow_sequences_that_change_rows_and_blocks() -> None:
    """A row of the tables should be right when another sequence takes it, and when its own got other blocks."""
    inputs = make_inputs()
    first, second = make_sequence(list(range(12)), block_ids=[7, 2]), make_sequence(list(range(9)), block_ids=[5, 3, 1])

    def decode(*chunks: tuple[Sequence, int]) -> list[list[int]]:
        inputs.fill(BatchPlan(tuple(PlannedChunk(s, start, 1, is_sampling=True) for s, start in chunks)))
        return [
            table[: start // 4 + 1].tolist()
            for table, (_, start) in zip(inputs.batch.block_tables, chunks, strict=True)
        ]

    assert decode((first, 6), (second, 8)) == [[7, 2], [5, 3, 1]]
    first.block_ids += [0]
    assert decode((first, 8), (second, 8)) == [[7, 2, 0], [5, 3, 1]]
    assert decode((second, 8), (first, 8)) == [[5, 3, 1], [7, 2, 0]]
    second.block_ids = [6, 4, 8]
    assert decode((second, 8)) == [[6, 4, 8]]
    assert inputs.slots.tolist() == [32]


def test_newest_tokens_may_come_last() -> None:
    """A step that was filled in before the last tokens were known should hold them once it is completed; tokens of
    prompts should stay."""
    inputs = make_inputs()
    talker, reader = make_sequence([5, 6, 0], block_ids=[1]), make_sequence([1, 2, 3, 4], block_ids=[3])
    plan = BatchPlan((PlannedChunk(talker, 2, 1, is_sampling=True), PlannedChunk(reader, 1, 3, is_sampling=True)))
    inputs.fill(plan)
    talker.token_ids[2] = 77
    inputs.complete(plan)
    assert inputs.token_ids.tolist() == [77, 2, 3, 4]


def test_twins_should_not_share_what_a_step_reads_on_a_cpu() -> None:
    """Filling one set should leave the other as it was."""
    inputs = make_inputs()
    twin, sequence = inputs.twin(), make_sequence(list(range(12)), block_ids=[0, 1, 2])
    inputs.fill(BatchPlan((PlannedChunk(sequence, 0, 4, is_sampling=False),)))
    twin.fill(BatchPlan((PlannedChunk(sequence, 4, 8, is_sampling=True),)))
    assert inputs.token_ids.tolist() == [0, 1, 2, 3]
    assert twin.token_ids.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert inputs.batch.chunks() == [(0, 4, 4)]
    assert twin.batch.chunks() == [(0, 8, 12)]
