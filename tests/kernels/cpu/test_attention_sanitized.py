"""The tests of attention and of the KV write once more, on C code that watches its own memory accesses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import CpuKernelsUnavailable, check_machine
from tests.kernels.cpu.attention_case import FLAGS_VARIABLE

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
HERE = Path(__file__).parent
# Odd sizes of everything, without the batches whose references take long
TESTS = "head_sizes or several_splits or threads_change or alone_equals or anywhere or wider_rows or equals_torch"


def _sanitizer() -> str:
    """The runtime that has to be loaded before everything else; skips the test where there is none."""
    try:
        check_machine()
    except CpuKernelsUnavailable as error:
        pytest.skip(f"no CPU kernels: {error}")
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler is installed")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"{compiler} has no libasan.so")
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_access_is_out_of_bounds_or_undefined() -> None:
    """Address and undefined-behaviour sanitizers should have nothing to say, with odd shapes of all kinds."""
    environment = os.environ | {
        "LD_PRELOAD": _sanitizer(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        FLAGS_VARIABLE: FLAGS,
    }
    files = [str(HERE / name) for name in ("test_attention.py", "test_rotary_kv.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", TESTS, "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "skipped" not in done.stdout
