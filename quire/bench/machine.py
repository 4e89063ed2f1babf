"""Which machine, commit and versions a figure belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from quire import __version__
from quire.bench.peers import kind_of

_PACKAGES = ("torch", "triton", "transformers", "redis", "aiohttp")


def describe() -> dict[str, object]:
    """Processor, cores of this process, memory, versions, and the commit of the tree that runs (None outside one)."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "quire": __version__,
        "commit": _commit(Path(__file__).resolve().parents[2]),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def kind() -> str | None:
    """Which of the machines that others were measured on this is like (`peers.py`)."""
    return kind_of(_cpuinfo())


def _cpu_model() -> str:
    names = (line.partition(":")[2].strip() for line in _cpuinfo().splitlines() if line.startswith("model name"))
    return next(names, platform.machine())


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """Short id of the checked-out commit, with `-dirty` when tracked files differ from it."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
