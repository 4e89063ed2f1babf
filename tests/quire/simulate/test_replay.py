"""`quire simulate --replay`: the same policy should decide the same, another one be told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.quire.simulate.test_simulate import run


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decision log of a run in which requests give way to others."""
    path = tmp_path_factory.mktemp("log") / "decisions"
    arguments = ("--requests=60", "--workers=2", "--load=3", "--num-blocks=40", "--max-tokens=300", "--spread=0.3")
    answer = run(*arguments, "--prompt-len=100", "--output-len=200", f"--decision-log={path}")
    assert answer.returncode == 0, answer.stderr
    assert " 0 preempted" not in answer.stdout
    return path


def test_the_same_policy_decides_the_same(log: Path) -> None:
    """A replay with the log's settings should find no difference, having looked at each line."""
    answer = run(f"--replay={log}")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[-1] == "no difference"
    num_lines = log.read_bytes().count(b"\n")
    assert f"replayed       {num_lines - 1:,} events" in answer.stdout
    assert "Preempt" in answer.stdout


def test_other_settings_show_what_would_have_been_decided(log: Path) -> None:
    """A flag that is given should replace the log's setting, be named, and the first difference be shown."""
    answer = run(f"--replay={log}", "--admission-headroom=200", "--tokens-per-sequence=8")
    assert answer.returncode == 0, answer.stderr
    assert "tokens_per_sequence: 32.0 in the log, 8.0 here" in answer.stdout
    assert "admission_headroom: None in the log, 200 here" in answer.stdout
    assert "the first is line " in answer.stdout
    assert "later events are still those that followed what was decided in the log" in answer.stdout


def test_a_changed_decision_is_found_at_its_line(log: Path, tmp_path: Path) -> None:
    """Should the log say something else than the policy decides, line, time and both decisions should be shown, and the
    exit code be 1."""
    lines = log.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if '[["Dispatch"' in line)
    line = json.loads(lines[index])
    line["decisions"][0][1]["worker_id"] = "w9:9"
    lines[index] = json.dumps(line) + "\n"
    (tmp_path / "log").write_text("".join(lines))
    answer = run(f"--replay={tmp_path / 'log'}")
    assert answer.returncode == 1
    assert f"different      answers to 1 events; the first is line {index + 1}, " in answer.stdout
    assert "w9:9" in answer.stdout


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [(None, "No such file", 2), ("{}\n", "line 1: not a decision log", 1), ("", "line 1: not a decision log", 1)],
)
def test_what_is_no_log_is_refused(text: str | None, words: str, code: int, tmp_path: Path) -> None:
    """A missing file and a file of something else should be named in one line."""
    path = tmp_path / "log"
    if text is not None:
        path.write_text(text)
    answer = run(f"--replay={path}")
    assert answer.returncode == code
    assert answer.stderr.count("\n") == 1
    assert words in answer.stderr
