"""The command line as a person meets it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

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


@pytest.mark.parametrize("arguments", [["simulate"], ["bench", "step"]])
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
        (["serve", "/no/such/folder"], "no such folder"),
        (["serve", "some-org/some-model"], "not fetched from a hub"),
        (["serve", "--enable-prefix-caching"], "not available"),
        (["bench", "serve", "--workload", "w9"], "w1, w2, w3, w4"),
    ],
)
def test_wrong_setting_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    """A wrong setting should end the command at once, in one line that names it."""
    answer = run(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.startswith("quire: error: ")
    assert answer.stderr.count("\n") == 1
    assert words in answer.stderr


def test_copied_server_command_takes_the_same_flags() -> None:
    """The module path that people copy should show the very flags of `quire serve`."""
    copied = run("--help", module="quire.entrypoints.openai.api_server")
    assert copied.returncode == 0
    assert copied.stdout == run("serve", "--help").stdout
