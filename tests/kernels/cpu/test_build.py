"""The compiled library in its cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu.build import COMPILE_TIMEOUT_S, LOCK, CpuKernelsUnavailable, Isa, build


@pytest.fixture
def copying_compiler(kernels_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Before the machine's compiler is one that gives at once what that has made: the library, sealed."""
    if shutil.which("cc") is None:
        pytest.skip("no cc to compile with")
    library = build(kernels_folder, Isa.AVX2).path.read_bytes()
    made = tmp_path / "made"
    made.write_bytes(library[: -hashlib.sha256().digest_size])
    _put_compiler(tmp_path, monkeypatch, f'while [ "$1" != -o ]; do shift; done; cp {made} "$2"')
    return library


def test_leftovers_of_a_killed_compiler_are_swept(copying_compiler: bytes, tmp_path: Path) -> None:
    """What nobody can be writing any more should go with the next compilation; a fresh folder is somebody's."""
    folder = tmp_path / "cache"
    old, fresh = folder / "unfinished-old", folder / "unfinished-fresh"
    for made_by_others in (old, fresh):
        made_by_others.mkdir(parents=True)
        (made_by_others / "pool.o").touch()
    os.utime(old, (0, old.stat().st_mtime - 2 * COMPILE_TIMEOUT_S - 1))
    made = build(folder, Isa.AVX2)
    assert made.is_new
    assert made.path.read_bytes() == copying_compiler
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, made.path.name, "unfinished-fresh"]


@pytest.mark.parametrize("keep", [0.0, 0.4, 1.0])
def test_a_damaged_library_is_compiled_again(copying_compiler: bytes, tmp_path: Path, keep: float) -> None:
    """Of what a crash or another program left, nothing should be loaded: a part of a library would kill its reader."""
    path = build(tmp_path, Isa.AVX2).path
    assert not build(tmp_path, Isa.AVX2).is_new
    damaged = bytearray(copying_compiler[: int(len(copying_compiler) * keep)])
    damaged[len(damaged) // 2 : len(damaged) // 2 + 64] = bytes(min(64, len(damaged)))
    path.write_bytes(damaged)
    assert build(tmp_path, Isa.AVX2).is_new
    assert path.read_bytes() == copying_compiler


def test_who_comes_at_once_waits_and_finds_it(copying_compiler: bytes, tmp_path: Path) -> None:
    """Of several that find no library at the same time one should compile it, the others load what that made."""
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: build(tmp_path / "cache", Isa.AVX2), range(4)))
    assert [build.is_new for build in made].count(True) == 1
    assert made[0].path.read_bytes() == copying_compiler


def test_a_compiler_that_writes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Success without a library should be a reason, not an empty library."""
    _put_compiler(tmp_path, monkeypatch, "exit 0")
    with pytest.raises(CpuKernelsUnavailable, match="wrote nothing"):
        build(tmp_path / "cache", Isa.AVX2)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [LOCK]


def _put_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    compiler = folder / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
