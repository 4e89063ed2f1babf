"""Compiles the C sources once for this machine's instruction set and loads the result.

The library lies in the cache folder under the hash of sources and flags, so a new version builds anew (twenty seconds
of one core; the sources are compiled side by side) and everybody else finds it. Who comes while another process builds
waits for that; a finished file is renamed into place. `python -m kernels.cpu.build` puts one for each instruction set
into the folder `built` beside the sources, where they are looked for first: images bring them along and need no
compiler. Without AVX2, or without a library and a compiler, why not is said once: the torch paths run then.

There are three instruction sets: AVX2 with FMA, AVX-512 with its dot products, and AMX beside that, whose tiles
multiply far faster. They add up in different orders, so a float sum may differ in its last bits between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kernels.cpu.compiler import run_compiler

_FOLDER = Path(__file__).parent
BUILT = _FOLDER / "built"
"""Comes with the sources, or is not there."""
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-unused-parameter",
          "-ffp-contract=off", "-fno-math-errno")  # fmt: skip
COMPILE_TIMEOUT_S = 300.0
_UNFINISHED = "unfinished-"
LOCK = ".kernels.lock"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux, x86-64: the system call, its code ARCH_REQ_XCOMP_PERM, and the processor state that tiles are."""


class Isa(Enum):
    """Instruction sets that the sources can be compiled for, the least first."""

    AVX2 = "avx2"
    AVX512 = "avx512"
    AMX = "amx"


_AVX2 = ("avx2", "fma", "f16c", "bmi2", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni")
_REQUIRED = {
    Isa.AVX2: _AVX2,
    Isa.AVX512: _AVX512,
    Isa.AMX: (*_AVX512, "amx_tile", "amx_bf16", "amx_int8"),
}
"""Names of /proc/cpuinfo. A machine with AVX-512 but without dot products of bfloat16 and int8 (before Cooper Lake and
Zen 4) takes AVX2."""
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mpopcnt")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni",
                 "-mprefer-vector-width=512")  # fmt: skip
_MACHINE_FLAGS = {
    Isa.AVX2: _AVX2_FLAGS,
    Isa.AVX512: _AVX512_FLAGS,
    Isa.AMX: (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}


class CpuKernelsUnavailable(Exception):
    """There is no library; the text says why."""


@dataclass(frozen=True, slots=True)
class Build:
    """Where a library is, and whether it had to be compiled."""

    path: Path
    is_new: bool


def load_library(
    cache_folder: Path, isa: Isa | None = None, before_compiling: Callable[[], None] = lambda: None
) -> ctypes.CDLL:
    """The library, compiled into `cache_folder` if it is not there yet.

    Args:
        isa: None: the best that this machine has (`best_isa`).
        before_compiling: called when that is about to be done; it takes many seconds.

    Raises:
        CpuKernelsUnavailable: the processor lacks an instruction set, there is no compiler, or it failed.
    """
    isa = isa or best_isa()
    check_machine(isa)
    path = build(cache_folder, isa, before_compiling=before_compiling).path
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CpuKernelsUnavailable(f"{path} can't be loaded: {error}") from None


def best_isa() -> Isa:
    """The greatest that processor and operating system allow, or AVX2 (which this machine may lack)."""
    for isa in (Isa.AMX, Isa.AVX512):
        with contextlib.suppress(CpuKernelsUnavailable):
            check_machine(isa)
            return isa
    return Isa.AVX2


def check_machine(isa: Isa) -> None:
    """Raise `CpuKernelsUnavailable` unless this process may use all that is compiled for `isa`."""
    flags = _cpu_flags()
    missing = [name for name in _REQUIRED[isa] if name not in flags]
    if missing:
        raise CpuKernelsUnavailable(f"the processor has no {', '.join(missing)}")
    if isa is Isa.AMX and not _may_use_tiles():
        raise CpuKernelsUnavailable("the operating system allows no AMX tiles")


def _may_use_tiles() -> bool:
    """Ask Linux, once for all threads of the process, to keep the tiles' state over context switches."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def build(
    cache_folder: Path,
    isa: Isa,
    extra_flags: tuple[str, ...] = (),
    *,
    before_compiling: Callable[[], None] = lambda: None,
) -> Build:
    """The library for these sources, compiled unless it is in the cache.

    Args:
        isa: the instruction set to compile for.
        extra_flags: for the compiler, as `-fsanitize=address`.
        before_compiling: see `load_library`.

    Raises:
        CpuKernelsUnavailable: no compiler, or it failed, or the folder can't be written.
    """
    flags = (*_FLAGS, *_MACHINE_FLAGS[isa], *extra_flags)
    name = f"kernels-{isa.value}-{_digest(flags)}.so"
    for path in (BUILT / name, cache_folder / name):
        if _is_whole(path):
            return Build(path, is_new=False)
    compiler = next((found for candidate in _COMPILERS if (found := shutil.which(candidate))), None)
    if compiler is None:
        raise CpuKernelsUnavailable(f"no C compiler ({', '.join(_COMPILERS)}) is installed")
    before_compiling()
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(cache_folder):
            if _is_whole(path):  # by somebody for whom this has waited
                return Build(path, is_new=False)
            _compile([compiler, *flags], path)
    except OSError as error:
        raise CpuKernelsUnavailable(f"can't write {path}: {error}") from None
    return Build(path, is_new=True)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Nobody else compiles into `folder` meanwhile, where its file system has locks; the kernel drops one whose process
    dies."""
    with (folder / LOCK).open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], path: Path) -> None:
    for left in path.parent.glob(f"{_UNFINISHED}*"):  # by somebody who was killed meanwhile
        if time.time() - left.stat().st_mtime > 2 * COMPILE_TIMEOUT_S:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as made:
        # Those that take longest first, so that none of them is left alone at the end.
        sources = sorted(_FOLDER.glob("*.c"), key=lambda source: source.stat().st_size, reverse=True)
        objects = [str(Path(made, f"{source.stem}.o")) for source in sources]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            commands = [[*command, "-c", str(source), "-o", o] for source, o in zip(sources, objects, strict=True)]
            for _ in threads.map(_run, commands):
                pass
        library = Path(made, path.name)
        _run([*command, "-shared", *objects, "-o", str(library), "-lm"])
        _seal(library)
        library.rename(path)


def _run(command: list[str]) -> None:
    try:
        status, errors = run_compiler(command, timeout_s=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise CpuKernelsUnavailable(f"{command[0]} took longer than {COMPILE_TIMEOUT_S:.0f} s") from None
    if status:
        raise CpuKernelsUnavailable(f"{command[0]} failed: {errors.strip()[-2000:]}")


def _seal(library: Path) -> None:
    """Append the digest of what was compiled, which loaders ignore: what a crash of the machine, a full disk or another
    program left of it would kill whoever loads it."""
    content = library.read_bytes() if library.exists() else b""
    if not content:
        raise CpuKernelsUnavailable("the compiler reported success and wrote nothing")
    with library.open("ab") as file:
        file.write(hashlib.sha256(content).digest())


def _is_whole(library: Path) -> bool:
    """Whether the file is there and is what `_seal` left."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr(flags).encode())
    for path in sorted(_FOLDER.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    line = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


if __name__ == "__main__":
    try:
        for each in Isa:
            print(build(BUILT, each).path)
    except CpuKernelsUnavailable as error:
        sys.exit(f"the CPU kernels can't be built: {error}")
