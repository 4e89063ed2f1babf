"""The compiled library in its cache folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kernels.cpu.build import COMPILE_TIMEOUT_S, CpuKernelsUnavailable, Isa, build

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")


@needs_gcc
def test_leftovers_of_a_killed_compiler_are_swept(tmp_path: Path) -> None:
    """A file that nobody can be writing any more should go with the next compilation; a fresh one is somebody's."""
    old, fresh = tmp_path / "unfinished-old.so", tmp_path / "unfinished-fresh.so"
    old.touch()
    fresh.touch()
    os.utime(old, (0, old.stat().st_mtime - COMPILE_TIMEOUT_S - 1))
    made = build(tmp_path, Isa.AVX2, ("-O0",))
    assert made.is_new
    assert sorted(path.name for path in tmp_path.iterdir()) == [made.path.name, "unfinished-fresh.so"]


@needs_gcc
@pytest.mark.parametrize("keep", [0.0, 0.4, 1.0])
def test_a_damaged_library_is_compiled_again(tmp_path: Path, keep: float) -> None:
    """Of what a crash or another program left, nothing should be loaded: a part of a library would kill its reader."""
    path = build(tmp_path, Isa.AVX2, ("-O0",)).path
    whole = path.read_bytes()
    assert not build(tmp_path, Isa.AVX2, ("-O0",)).is_new
    damaged = bytearray(whole[: int(len(whole) * keep)])
    damaged[len(damaged) // 2 : len(damaged) // 2 + 64] = bytes(min(64, len(damaged)))
    path.write_bytes(damaged)
    assert build(tmp_path, Isa.AVX2, ("-O0",)).is_new
    assert len(path.read_bytes()) == len(whole)


def test_a_compiler_that_writes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Success without a library should be a reason, not an empty library."""
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\nexit 0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    with pytest.raises(CpuKernelsUnavailable, match="wrote nothing"):
        build(tmp_path / "cache", Isa.AVX2)
    assert list((tmp_path / "cache").iterdir()) == []
