"""The compiled library in its cache folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kernels.cpu.build import COMPILE_TIMEOUT_S, Isa, build


def test_leftovers_of_a_killed_compiler_are_swept(tmp_path: Path) -> None:
    """A file that nobody can be writing any more should go with the next compilation; a fresh one is somebody's."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile with")
    old, fresh = tmp_path / "unfinished-old.so", tmp_path / "unfinished-fresh.so"
    old.touch()
    fresh.touch()
    os.utime(old, (0, old.stat().st_mtime - COMPILE_TIMEOUT_S - 1))
    made = build(tmp_path, Isa.AVX2, ("-O0",))
    assert made.is_new
    assert sorted(path.name for path in tmp_path.iterdir()) == [made.path.name, "unfinished-fresh.so"]
