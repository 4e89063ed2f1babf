"""A `quire serve` of one's own to measure: started, waited for, looked at, stopped."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire.bench import processes
from quire.bench.progress import say
from quire.private_folder import private_folder
from shared.config import child_environment
from shared.errors import QuireError
from shared.process import dying_with_parent

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.02
SAMPLE_S = 0.25
LOG_LINES = 15

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServedModel:
    """`quire serve MODEL FLAGS` on a free port, from `with` to the end of the block. Ctrl-C reaches this process only,
    which then stops the cell; should this process be killed, the kernel ends the cell.

    Attributes:
        start_s: seconds from the start of the launcher until the gateway said that it is ready.
    """

    def __init__(self, model: Path, flags: tuple[str, ...] = ()) -> None:
        self._model = model
        self._flags = flags
        self.start_s = 0.0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as cleanup:
            folder = cleanup.enter_context(private_folder(say))
            self._state_file, self._log = folder / "state.json", folder / "cell.log"
            since = time.monotonic()
            self._process = self._launch()
            cleanup.callback(self._end)
            self._wait_ready(since + START_TIMEOUT_S)
            self.start_s = time.monotonic() - since
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    @property
    def url(self) -> str:
        """Address of the gateway, without /v1."""
        return str(self._state()["urls"][0])

    @property
    def pids(self) -> list[int]:
        """Launcher, services and Redis."""
        return processes.tree(self._process.pid)

    def num_blocks_used(self) -> int:
        """KV blocks in use now, by the gateway's metrics; 0 if they cannot be had."""
        try:
            with _opener.open(f"{self.url}/metrics", timeout=5) as response:
                lines = response.read().decode().splitlines()
        except OSError:
            return 0
        values = [line.rpartition(" ")[2] for line in lines if line.startswith("vllm:num_blocks_used")]
        return int(float(values[0])) if values else 0

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "quire", "serve", str(self._model), "--port=0"]
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [*command, f"--state-file={self._state_file}", *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment({}),
                start_new_session=True,
                preexec_fn=dying_with_parent(),  # noqa: PLW1509 - whoever measures has one thread between two cells
            )

    def _state(self) -> dict[str, Any]:
        if not self._state_file.exists():
            return {}
        state: dict[str, Any] = json.loads(self._state_file.read_text(encoding="utf-8"))
        return state

    def _wait_ready(self, deadline: float) -> None:
        while not self._state().get("is_ready"):
            if self._process.poll() is not None:
                raise QuireError(f"quire serve ended with {self._process.returncode}:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise QuireError(f"quire serve was not ready after {START_TIMEOUT_S:.0f} s:\n{self._last_words()}")
            time.sleep(POLL_S)

    def _end(self) -> None:
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)  # not SIGINT: while it starts up it may ignore that, as we may
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise QuireError(f"quire serve did not stop within {STOP_TIMEOUT_S:.0f} s; killed") from None
        finally:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


class BlockWatch:
    """Notes the most KV blocks that were in use within a `with` block, by asking four times a second in a thread."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.most = max(self.most, self._served.num_blocks_used())
