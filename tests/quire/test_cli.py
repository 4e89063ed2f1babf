"""The command line as a person meets it, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from quire import __version__


def run(*arguments: str, module: str = "quire") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_help_lists_the_commands() -> None:
    """`quire --help` should name every command there is."""
    answer = run("--help")
    assert answer.returncode == 0
    assert "serve" in answer.stdout
    assert "bench" in answer.stdout


def test_version() -> None:
    """`quire --version` should print the package's version."""
    assert run("--version").stdout == f"quire {__version__}\n"


@pytest.mark.parametrize("arguments", [["replay"], ["bench", "simulate"]])
def test_unknown_command_names_those_that_exist(arguments: list[str]) -> None:
    """A command that is not there should be refused in one line that lists what is."""
    answer = run(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert answer.stderr.startswith("quire: error: no ")
    assert "serve" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs='0': must be 1 to 4096"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--max-seqs", "3"], "did you mean --max-num-seqs?"),
        (["serve", "--redis-url", "localhost:6379"], "--redis-url: no address of a Redis; use redis://"),
        (["serve", "/no/such/folder"], "no such folder"),
        (["serve", "some-org/some-model"], "not fetched from a hub"),
        (["bench", "serve", "--workload", "w9"], "w1, w2, w3, w4"),
        (["bench", "serve", "--base-url", "127.0.0.1:8000"], "--base-url=127.0.0.1:8000: must be like http://"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:8000/v1"], "without /v1"),
        (["bench", "serve", "--json", "/no/such/figures.json"], "--json=/no/such/figures.json: its folder"),
        (["bench", "table", "--configuration", "q7b"], "--configuration=q7b: choose from q05b-bf16, "),
        (["bench", "table", "--workload", "w9"], "--workload=w9: choose from w1, w2, w3, w4"),
        (["bench", "table", "--peer-url", "http://127.0.0.1:1/v1"], "--peer-url=http://127.0.0.1:1/v1: must be like"),
        (["bench", "table", "--serve-flags", "--max-num-seqs 0"], "--max-num-seqs='0': must be 1 to 4096"),
        (["bench", "table", "--out", "/dev/null/x"], "--out=/dev/null/x"),
        (["bench", "growth", "--out", "/dev/null/x"], "--out=/dev/null/x"),
        (["bench", "growth", "huge"], "choose from q05b, tiny, test"),
        (["bench", "step", "/no/such/folder"], "no such folder"),
        (["bench", "step", "--json", "/no/such/figures.json"], "--json=/no/such/figures.json: its folder"),
    ],
)
def test_wrong_setting_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    """A wrong setting should end the command at once, in one line that names it."""
    answer = run(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.startswith("quire: error: ")
    assert answer.stderr.count("\n") == 1
    assert words in answer.stderr


@pytest.mark.parametrize("flag", ["--cache-dir", "--data-dir"])
def test_a_folder_that_cannot_be_is_named(flag: str, tmp_path: Path) -> None:
    """A folder that cannot be made should be refused in one line with flag and reason, not with a traceback."""
    (tmp_path / "file").touch()
    model = [] if flag == "--cache-dir" else [str(make_folder(tmp_path))]
    answer = run("serve", *model, "--port=0", f"{flag}={tmp_path / 'file' / 'below'}")
    assert answer.returncode == 2
    assert answer.stderr == f"quire: error: {flag}={tmp_path / 'file' / 'below'}: Not a directory\n"


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("quire", [LONG]),
        ("quire", ["bench", LONG]),
        ("quire", ["serve", "--port=0", LONG]),
        ("quire", ["serve", "--port=0", f"--cache-dir={LONG}"]),
        ("quire", ["serve", "--port=0", f"--host={LONG}"]),
        ("quire", ["serve", "--port=0", f"--speculative-config={LONG}"]),
        ("quire", ["bench", "step", LONG]),
        ("quire", ["bench", "step", "test", f"--cache-dir={LONG}"]),
        ("quire", ["bench", "step", "test", f"--json={LONG}/x"]),
        ("quire", ["bench", "growth", f"--out={LONG}"]),
        ("quire", ["bench", "serve", f"--base-url={LONG}"]),
        ("quire", ["bench", "serve", f"--workload={LONG}"]),
        ("quire", ["bench", "table", f"--workload={LONG}"]),
        ("quire", ["bench", "table", f"--configuration={LONG}"]),
        ("quire", ["bench", "model", "tiny", LONG]),
        ("gateway", ["--redis-url=unix:///no.sock", f"--model={LONG}"]),
        ("gpu_worker", ["--redis-url=unix:///no.sock", "--device=cpu", f"--model={LONG}"]),
        ("scheduler_svc", ["--redis-url=unix:///no.sock", f"--log-level={LONG}"]),
        ("scheduler_svc", ["--redis-url=unix:///no.sock", "--metrics-port=0", f"--metrics-host={LONG}"]),
    ],
    ids=lambda part: None if isinstance(part, str) else " ".join(part)[:40],
)
def test_what_was_given_is_not_repeated_at_length(module: str, arguments: list[str]) -> None:
    """A value of 100 kB should be refused in one short line, not with a traceback: no terminal is flooded."""
    answer = run(*arguments, module=module)
    assert answer.returncode == 2
    last = answer.stderr.splitlines()[-1]  # a service logs what it is about to do
    assert last.startswith(f"{module}: error: ")
    assert "xxx...xxx" in last
    assert len(answer.stderr) < 700


def test_a_long_address_is_not_repeated_at_length() -> None:
    """A server that cannot be reached should be named by its ends, with exit code 1."""
    answer = run("bench", "serve", f"--base-url=http://{LONG}")
    assert answer.returncode == 1
    assert answer.stderr.startswith("quire: error: http://xxx")
    assert "xxx does not list its models: " in answer.stderr
    assert len(answer.stderr) < 600


def test_a_long_data_dir_is_not_repeated_at_length(tmp_path: Path) -> None:
    """The folder of the private Redis' data is looked at later than the rest, and should be refused as shortly."""
    answer = run("serve", str(make_folder(tmp_path)), "--port=0", f"--data-dir={LONG}")
    assert answer.returncode == 2
    assert answer.stderr.endswith(": File name too long\n")
    assert len(answer.stderr) < 600


def test_serving_waits_for_the_redis_it_was_given(tmp_path: Path) -> None:
    """While the given Redis does not answer, one line should say so; nothing is started, and Ctrl-C ends it with 0."""
    command = [sys.executable, "-m", "quire", "serve", str(make_folder(tmp_path)), "--port=0"]
    url = f"unix://{tmp_path}/no.sock"
    with subprocess.Popen([*command, f"--redis-url={url}"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            waiting = next(line for line in lines if "waiting" in line)
            assert waiting.startswith(f"quire: waiting for the Redis at {url}: ")
            assert not psutil.Process(process.pid).children()
            process.send_signal(signal.SIGINT)
            assert "started" not in "".join(lines)
            assert process.wait(30) == 0
        finally:
            process.kill()


def make_folder(parent: Path) -> Path:
    """A folder with the files of a checkpoint, all empty: enough for what happens before anything is started."""
    folder = parent / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def test_copied_server_command_takes_the_same_flags() -> None:
    """The module path that people copy should show the very flags of `quire serve`."""
    copied = run("--help", module="quire.entrypoints.openai.api_server")
    assert copied.returncode == 0
    assert copied.stdout == run("serve", "--help").stdout
