"""A real cell under test: the launcher in a process of its own, with everything it starts.

`Cell.stop` and `Cell.close` leave nothing behind and say so when the launcher did: every process of a cell carries the
address of its private Redis in its environment or command line, which is how leftovers are found.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import wait_until

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0


class Cell:
    """`quire serve MODEL --port 0 FLAGS`, running and ready.

    Args:
        model: None is the default model.
        folder: for the log and the state file; logs of all services are in `folder/cell.log`.
    """

    def __init__(self, model: Path | None, folder: Path, *flags: str) -> None:
        self.folder = folder
        self._state_file = folder / "state.json"
        self._state_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "quire", "serve", "--port=0", f"--state-file={self._state_file}"]
        command += ["--die-with-parent", "--drain-s=5", *([] if model is None else [f"--model={model}"])]
        with open(folder / "cell.log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(self._is_up, description="the cell's ready line", timeout_s=START_TIMEOUT_S)
        except AssertionError as error:
            self.close()
            raise AssertionError(f"{error}\n{self.log()[-6000:]}") from None

    @property
    def state(self) -> dict[str, Any]:
        """What the launcher last wrote: pids by name, ports, urls, redis_url, model, is_ready."""
        if not self._state_file.exists():
            return {}
        state: dict[str, Any] = json.loads(self._state_file.read_text())
        return state

    @property
    def url(self) -> str:
        """Base address of the first gateway, without /v1."""
        return str(self.state["urls"][0])

    @property
    def redis_url(self) -> str:
        return str(self.state["redis_url"])

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: redis, scheduler, worker-0, ..., gateway-0, ..."""
        return dict(self.state["pids"])

    def log(self) -> str:
        """All that launcher and services have written."""
        return (self.folder / "cell.log").read_text(errors="replace")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send `number` to the service `name`; its process id."""
        pid = self.pids[name]
        os.kill(pid, number)
        return pid

    def wait_restarted(self, name: str, old_pid: int) -> None:
        """Until `name` runs as another process than `old_pid`."""
        wait_until(lambda: self.pids.get(name, old_pid) != old_pid, description=f"a new {name}")

    def processes(self) -> list[psutil.Process]:
        """Every living process of this cell, the launcher excepted, whoever its parent is now."""
        address = self.state.get("redis_url", "")
        return [process for process in psutil.process_iter() if address and _belongs(process, address)]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ask the launcher to stop; its exit code once it has."""
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """Stop, by force if need be; raises when anything was left behind."""
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        _, left = psutil.wait_procs(self.processes(), timeout=5)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert not left, f"left behind: {left}\n{self.log()[-3000:]}"

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the launcher ended with {self.process.returncode}")
        return bool(self.state.get("is_ready"))


def _belongs(process: psutil.Process, address: str) -> bool:
    socket_path = address.removeprefix("unix://")
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get("QUIRE_REDIS_URL") == address or socket_path in " ".join(process.cmdline())
    except psutil.Error:
        return False
