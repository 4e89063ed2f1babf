"""`quire bench step` and `quire bench growth` on the test model."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpu_worker.engine.batch_plan import DrawnToken
from gpu_worker.engine.sequence import SequenceStatus
from quire.bench import growth, step, stepping
from quire.bench.queued_policy import QueuedPolicy
from quire.bench.step import StepConfig
from quire.bench.stepping import Bench, NullRunner, make_sequence
from shared.clock import ManualClock
from shared.config import EngineConfig
from shared.errors import ConfigError


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the model is made once."""
    return str(tmp_path_factory.mktemp("cache"))


def test_profile_shows_every_part(cache_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All parts of a step, its view among them, should be shown with their shares, and add up to it."""
    path = tmp_path / "figures.json"
    assert step.main(["--quick", "--profile", f"--cache-dir={cache_dir}", f"--json={path}"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {part} " in shown for part in stepping.PARTS if part != "sampling")
    times = json.loads(path.read_text())["times"]
    whole = sum(times["wall_s"]) / len(times["wall_s"])
    parts_s = [seconds for name, seconds in times["parts_s"].items() if "." not in name]
    assert sum(parts_s) == pytest.approx(whole)
    assert all(times["parts_s"][part] > 0 for part in ("plan", "inputs", "forward", "keep"))


def test_prompts_can_be_timed(cache_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --prefill the steps that compute the prompts should be timed: one for two short prompts."""
    assert step.main(["--quick", "--prefill", f"--cache-dir={cache_dir}"]) == 0
    assert "prompts: 1 steps" in capsys.readouterr().out


def test_adapters_are_compared_with_none(cache_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --adapters steps with and without should be timed, and their ratio be shown."""
    assert step.main(["--quick", "--adapters=2", "--adapter-rank=4", f"--cache-dir={cache_dir}"]) == 0
    shown = capsys.readouterr().out
    assert "no adapters: 9 steps" in shown
    assert "2 adapters of rank 4: 9 steps" in shown
    assert "of that without" in shown


class PacedRunner(NullRunner):
    """Always right, and steps take what the clock is told: `fixed_s`, and `row_s` for each row."""

    def __init__(self, clock: ManualClock, *, fixed_s: float = 0.0, row_s: float = 0.0) -> None:
        super().__init__(64)
        self._clock, self._fixed_s, self._row_s = clock, fixed_s, row_s

    def finish(self) -> list[DrawnToken]:
        self._clock.advance(self._fixed_s + self._row_s * self._plan.num_tokens)
        return super().finish()


def speculating_bench(clock: ManualClock, runner: NullRunner) -> Bench:
    """Two sequences that repeat one token are in it."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    limits = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, speculative_config=json.dumps(config))
    bench = Bench(runner, limits, max_model_len=256, clock=clock)
    bench.add(make_sequence(i, [7, 7], max_tokens=100) for i in range(2))
    return bench


def test_drafts_are_counted() -> None:
    """With speculation all tokens that came should be counted, not a token a step, and drafts be shown: where steps
    take as long whatever they hold, as soon as that is known, which takes two sizes of steps."""
    clock = ManualClock()
    bench = speculating_bench(clock, PacedRunner(clock, fixed_s=0.01))
    assert bench.step(2).num_drafted == 0
    times = bench.step(10)
    assert times.num_drafted == times.num_accepted == 10 * 2 * 3
    assert times.num_drawn == 2 * 10 + times.num_accepted
    shown = step._format("title", times, StepConfig(batch=2))
    assert "drafts: 60 tokens, 100 % of them right, 4.00 tokens a step and sequence" in shown


def test_drafts_that_do_not_pay_are_not_taken() -> None:
    """Where a row more takes as long as a token by itself, there should be no drafts, as in a worker."""
    clock = ManualClock()
    bench = speculating_bench(clock, PacedRunner(clock, row_s=0.01))
    times = bench.step(12)
    assert times.num_drafted == 0
    assert times.num_drawn == 2 * 12
    assert "drafts" not in step._format("title", times, StepConfig(batch=2))


def test_an_engine_learns_by_the_clock_of_the_machine() -> None:
    """Without another clock the time of steps should be known after the first ones."""
    bench = Bench(NullRunner(64), EngineConfig(), max_model_len=256)
    bench.add([make_sequence(0, [1, 2, 3], max_tokens=9)])
    taken = bench.step(5)
    assert 0 < bench.engine._cost.step_s(1.0) < sum(taken.wall_s)


@pytest.mark.parametrize(("max_step_ms", "count"), [(stepping.NO_STEP_LIMIT_MS, 3), (150.0, 6)])
def test_prompts_are_computed_in_whole_steps(max_step_ms: float, count: int) -> None:
    """However long steps take, prompts should be cut to `--max-num-batched-tokens` only, also beside sequences that
    have theirs; a worker's limit would cut them to a few tokens a step."""
    clock = ManualClock()
    limits = EngineConfig(max_num_seqs=4, max_num_batched_tokens=42, max_step_ms=max_step_ms)
    bench = Bench(PacedRunner(clock, row_s=0.01), limits, max_model_len=256, clock=clock)
    sequences = [make_sequence(i, [7] * 40, max_tokens=100) for i in range(3)]
    bench.add(sequences)
    assert len(bench.step_until_drawn(sequences).wall_s) == count


@pytest.mark.parametrize(("flag", "words"), [("--context=5000", "takes 4096"), ("--batch=4096", "does not fit")])
def test_what_does_not_fit_is_refused(cache_dir: str, flag: str, words: str) -> None:
    """More tokens than the model or the cache takes should be a clear error before anything is computed."""
    with pytest.raises(ConfigError, match=words):
        step.main(["test", "--context=3000", flag, f"--cache-dir={cache_dir}",
                   "--engine-flags=--kv-cache-memory-bytes=8000000"])  # fmt: skip


def test_growth_writes_every_chart(cache_dir: str, tmp_path: Path) -> None:
    """Each chart should have a positive value at each of its points, in the JSON and in the plot."""
    assert growth.main(["--quick", f"--cache-dir={cache_dir}", f"--out={tmp_path}"]) == 0
    (figures,) = tmp_path.glob("growth-test-*.json")
    charts = json.loads(figures.read_text())["charts"]
    assert len(charts) == 9
    for chart in charts:
        for points in chart["series"].values():
            assert len(points) == 2
            assert all(x > 0 and y > 0 for x, y in points)
    (plot,) = tmp_path.glob("growth-test-*.svg")
    num_lines = sum(len(chart["series"]) for chart in charts)
    assert len(list(ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}polyline"))) == num_lines


def test_growth_of_the_policy_needs_no_model(tmp_path: Path) -> None:
    """With --only policy the scheduler's two charts should be measured, without a model's folder."""
    command = ["--quick", "--only=policy", "--cache-dir=/no/such/folder", f"--out={tmp_path}"]
    assert growth.main(command) == 0
    (figures,) = tmp_path.glob("growth-policy-*.json")
    charts = json.loads(figures.read_text())["charts"]
    assert [chart["x_label"] for chart in charts] == ["queued requests", "workers"]
    assert [[x for x, _ in chart["series"]["report"]] for chart in charts] == [[1, 100], [1, 10]]


@pytest.mark.parametrize("num_workers", [1, 7])
def test_the_queue_keeps_its_length_while_it_is_measured(num_workers: int) -> None:
    """The policy should have as many requests waiting after the events as before, all slots taken."""
    policy = QueuedPolicy(50, num_workers)
    assert policy.num_queued == 50
    times = policy.time_events(20)
    assert policy.num_queued == 50
    assert set(times) == {"report", "submit", "end and dispatch", "tick"}


def test_steps_without_a_model_serve_every_sequence() -> None:
    """The stand-in for a model should make sequences grow by a token a step and end."""
    bench = Bench(NullRunner(64), EngineConfig(max_num_seqs=4, max_num_batched_tokens=64), max_model_len=256)
    sequences = [stepping.make_sequence(rank, [1, 2, 3], max_tokens=3) for rank in range(6)]
    bench.add(sequences)
    bench.step_until_drawn(sequences[:4])
    assert [sequence.num_output for sequence in sequences] == [1, 1, 1, 1, 0, 0]
    bench.step(5)
    assert all(sequence.status is SequenceStatus.ENDED for sequence in sequences)
    assert not bench.engine.has_work


def test_prompts_are_the_same_in_every_run() -> None:
    """Two runs should compute the same, or their times could not be compared."""
    first, again = (stepping.random_prompts(2, 5, 100) for _ in range(2))
    assert first == again
    assert first[0] != first[1]


def test_parts_of_parts_are_indented_and_not_counted_twice() -> None:
    """What a runner tells by op should stand below its part; shares should be of the whole."""
    parts = {"plan": 1e-6, "forward": 3e-6, "forward.attention": 2e-6, "keep": 0.0}
    lines = stepping.describe(
        stepping.TimedSteps(wall_s=(4e-6,), cpu_s=(4e-6,), view_s=(0.0,), parts_s=parts)
    ).splitlines()
    assert [line.split()[0] for line in lines] == ["part", "plan", "forward", "attention", "keep"]
    assert [line.split()[2] for line in lines[1:]] == ["25.0", "75.0", "50.0", "0.0"]
    assert lines[3].startswith("    attention")
