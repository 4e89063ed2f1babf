"""An engine that makes steps ready beside compute draws what one draws that does one thing after the other."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from gpu_worker.engine.engine import Engine, NewEntries
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.runner import DecoderRunner
from shared.ids import RequestId
from shared.messages import SamplingParams
from tests.gpu_worker.model.plans import make_runner

SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "num_logprobs": 3},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": tuple(range(0, 500, 9))},
)


def make_sequences() -> list[Sequence]:
    rng = random.Random(5)
    made = []
    for number in range(18):
        prompt = [rng.randrange(500) for _ in range(rng.randint(1, 40))]
        settings = SAMPLINGS[number % len(SAMPLINGS)]
        sampling = SamplingParams(**{"seed": number, "max_tokens": rng.randint(1, 24), **settings})  # type: ignore[arg-type]
        made.append(
            Sequence(
                request_id=RequestId(f"r{number:02}"), attempt=1, choice=0, rank=number, token_ids=prompt,
                num_prompt_tokens=len(prompt), sampling=sampling,
            )
        )  # fmt: skip
    return made


def serve(runner: DecoderRunner, *, is_ahead: bool) -> dict[str, list[NewEntries]]:
    """All that each request gains; some come later, one is dropped and one preempted on the way."""
    engine = Engine(runner, max_model_len=100, max_num_seqs=8, max_num_batched_tokens=24)
    coming = make_sequences()
    gained: dict[str, list[NewEntries]] = {sequence.request_id: [] for sequence in coming}
    number = 0
    while engine.has_work or coming:
        if coming and number % 2 == 0:
            engine.add(coming.pop(0))
        if number == 9:
            engine.drop(RequestId("r03"))
        for new in engine.step((lambda: True) if is_ahead else None).entries:
            gained[new.request_id].append(new)
        engine.check_integrity()
        number += 1
    assert len(runner._sampler._rows._free) == 8, "no row of the sampler should be left behind"
    return gained


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_what_is_drawn_should_not_depend_on_what_was_made_ready(
    kernels: str, llama_folder: Path, request: pytest.FixtureRequest
) -> None:
    """Tokens, logprobs and finishes should be equal, whatever a sequence's sampling remembers of its tokens."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    settings = {"cpu_kernels": kernels, "num_threads": 2, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    runner = make_runner(llama_folder, **settings, kv_cache_memory_bytes=1 << 19)
    torch.set_num_threads(1)  # the pool has two; torch's would meet in barriers, which take long on a busy machine
    expected, actual = serve(runner, is_ahead=False), serve(runner, is_ahead=True)
    dropped, dropped_ahead = expected.pop("r03"), actual.pop("r03")
    assert expected == actual
    assert any(new.finish == "stop" for news in expected.values() for new in news)
    assert dropped_ahead == dropped[: len(dropped_ahead)]


@pytest.mark.usefixtures("cpu_kernels")
def test_a_step_should_compute_beside_its_caller(llama_folder: Path) -> None:
    """The pool's threads should finish a step by themselves, while the caller does something else."""
    runner = make_runner(llama_folder, cpu_kernels="on", num_threads=2)
    engine = Engine(runner, max_model_len=100, max_num_seqs=8, max_num_batched_tokens=24)
    engine.add(make_sequences()[0])
    engine.step(lambda: True)
    assert runner._model._pool._is_started, "the next step should be in flight"
    engine.clear()
    assert not runner._model._pool._is_started
