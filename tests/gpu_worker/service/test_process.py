"""`python -m gpu_worker` as a process: what it does with settings that are wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

CASES = [
    ((), "redis_url is empty"),
    (("--redis-url", "redis://localhost:1"), "model is empty"),
    (("--max-num-seqs", "0"), "--max-num-seqs='0': must be 1 to 4096"),
    (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
    (("--enable-prefix-caching",), "--enable-prefix-caching"),
]


@pytest.mark.parametrize(("argv", "expected"), CASES)
def test_a_wrong_setting_should_end_it_with_one_line(argv: tuple[str, ...], expected: str) -> None:
    """The process should end with 2 and name the setting in one line, with no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker", *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
