"""The examples, as they are, in processes of their own: each runs to its end and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.e2e.cell import Cell

FOLDER = Path(__file__).resolve().parents[2] / "examples"
WARNING = "half.widened dtype=float16 kv_cache_dtype=fp16 instead=float32"


def run(name: str, argument: str) -> tuple[str, str]:
    """Output and errors of an example, which must succeed and leave no process."""
    command = [sys.executable, str(FOLDER / name), argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    left = [process for process in psutil.process_iter() if f"--model={argument}" in _command_line(process)]
    assert psutil.wait_procs(left, timeout=5)[1] == []
    return done.stdout, done.stderr


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_offline(model_folder: Path) -> None:
    """The published snippet should run as it is, apart from its import, with one warning and a bar."""
    out, errors = run("offline.py", str(model_folder))
    assert [line.partition(",")[0] for line in out.splitlines()].count("Prompt: 'Hello") == 1
    assert out.count("Generated text: ") == 4
    assert errors.count(WARNING) == 1
    assert "4/4" in errors


def test_chat(model_folder: Path) -> None:
    """Conversations should be answered, one by itself as among others."""
    out, _ = run("chat.py", str(model_folder))
    answers = [line for line in out.splitlines() if line.startswith("Answer: ")]
    assert len(answers) == 3
    assert answers[0] == answers[1]


def test_sampling(model_folder: Path) -> None:
    """Each prompt should have its own parameters and as many choices as they ask for."""
    out, _ = run("sampling.py", str(model_folder))
    assert [line.partition(":")[0] for line in out.splitlines()[:1]] == ["0.0"]
    assert all(f"\n{name}: " in out for name in ("1.0", "1.1", "2.0"))
    assert "Counter(name='vllm:generation_tokens'" in out


def test_streaming(model_folder: Path) -> None:
    """Text should come in parts, and a request end where it was aborted."""
    out, _ = run("streaming.py", str(model_folder))
    assert out.rstrip().endswith(": abort")


def test_running_server(cell: Cell) -> None:
    """A running server should give the same to this API and to OpenAI's client."""
    out, _ = run("running_server.py", cell.url)
    ours, theirs = (line.partition(" ")[2].strip() for line in out.splitlines())
    assert ours == theirs
