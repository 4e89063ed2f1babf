"""The tests of the C kernels once more, with kernels that check every access and every undefined operation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cpu.conftest import FLAGS_VARIABLE

FLAGS = "-O1 -g -fsanitize=address,undefined -fno-sanitize=alignment -fno-sanitize-recover=all"
"""Alignment is left out: the vector types of gathers and unaligned loads are read through plain pointers."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_run_clean_under_sanitizers() -> None:
    """No kernel should read or write outside its buffers or do anything undefined, at any odd size."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("the sanitizers' runtimes are looked up with gcc")
    runtimes = [_runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    environment = {
        **os.environ,
        FLAGS_VARIABLE: FLAGS,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-qsx", "-p", "no:cacheprovider", str(folder)]
    ignored = ["--ignore", __file__]  # and -s: what a sanitizer says before it aborts would be lost
    done = subprocess.run(
        [*command, *ignored], env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "passed" in done.stdout
    assert "no tests ran" not in done.stdout


def _runtime(compiler: str, name: str) -> str:
    done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()
