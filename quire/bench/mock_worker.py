"""`python -m quire.bench.mock_worker`: the worker service around a model that costs nothing, to measure all else.

The service is the real one, so commits, beats and reports are those of a worker; only the model is none. It answers
with the prompt's tokens, over and over, so that a client knows what must come. A step that holds prompt tokens is over
at once (a request is answered instantly); any other lasts `--step-ms`, in which its thread sleeps.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field

import uvloop

from gpu_worker.engine.batch_plan import DrawnToken
from gpu_worker.engine.chunks import BatchPlan
from gpu_worker.engine.sequence import Sequence
from gpu_worker.service import WorkerService, new_place
from shared import logs
from shared.config import EngineConfig, ModelConfig, ProcessConfig, WorkerConfig, load
from shared.errors import ConfigError
from shared.flags import setting
from shared.process import die_with_parent, install_stop_signals

MODEL_NAME = "echo"
MAX_MODEL_LEN = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class MockWorkerConfig:
    step_ms: float = setting(20.0, "how long a step without prompt tokens takes", minimum=0)
    engine: EngineConfig = field(default_factory=EngineConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


class EchoModel:
    """A model runner: the token at output position p is token p of the prompt, from its start again after its end."""

    fingerprint = MODEL_NAME
    quantization = "none"
    max_model_len = MAX_MODEL_LEN
    dtype = "float32"
    device = "none"
    num_blocks = 65_536
    key_cost = 0.0
    host_memory = None
    adapter_source = None
    window = 0

    def __init__(self, *, step_s: float, block_size: int) -> None:
        self.block_size = block_size
        self._step_s = step_s
        self._due = time.monotonic()
        self._plan = BatchPlan(())

    def prepare(self, plan: BatchPlan) -> None:
        """There is nothing to prepare."""

    def start(self, plan: BatchPlan) -> None:
        self._plan = plan

    def finish(self) -> list[DrawnToken]:
        plan = self._plan
        if all(chunk.start >= chunk.sequence.num_prompt_tokens for chunk in plan.chunks):
            self._pace()
        sampling = (chunk for chunk in plan.chunks if chunk.is_sampling)
        return [_draw(chunk.sequence, ahead) for chunk in sampling for ahead in range(1 + len(chunk.draft))]

    def forget(self, sequence: Sequence) -> None:
        """There is nothing to forget."""

    def _pace(self) -> None:
        """Sleep until the step's time is over; what was slept too long is taken off the next step."""
        now = time.monotonic()
        self._due = max(self._due, now - self._step_s) + self._step_s
        time.sleep(max(0.0, self._due - now))


def main() -> int:
    """Run until a signal; the exit code: 0, or 2 for a wrong setting."""
    try:
        config = load(MockWorkerConfig, sys.argv[1:], program="python -m quire.bench.mock_worker")
        if not config.process.redis_url:
            raise ConfigError("--redis-url: name a Redis")
        if config.process.die_with_parent:
            die_with_parent()
        logs.set_up("mock_worker", config.process.log_level)
        uvloop.run(_serve(config))
    except ConfigError as error:
        print(f"mock_worker: error: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: MockWorkerConfig) -> None:
    from shared.redis_bus import open_bus

    stop = asyncio.Event()
    install_stop_signals(stop)
    bus = open_bus(config.process.redis_url)
    model = EchoModel(step_s=config.step_ms / 1000, block_size=config.engine.block_size)
    named = ModelConfig(model=MODEL_NAME, served_model_name=(MODEL_NAME,))
    worker = WorkerConfig(model=named, engine=config.engine, process=config.process)
    try:
        await WorkerService(bus, worker, model, new_place()).run(stop)
    finally:
        await bus.close()


def _draw(sequence: Sequence, ahead: int) -> DrawnToken:
    return DrawnToken(sequence.token_ids[(sequence.num_output + ahead) % sequence.num_prompt_tokens])


if __name__ == "__main__":
    sys.exit(main())
