"""A `quire serve` of one's own to measure: started, waited for, looked at, stopped."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
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
REPORT_TIMEOUT_S = 10.0
REPORT_LAG_S = 3.0
"""An idle worker reports once a second, and a gateway reads reports once a second for up to half of one."""
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
        return self._gauge("vllm:num_blocks_used")

    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds, by the gateway's metrics, once a worker has reported."""
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while not (num_tokens := self._gauge("quire:num_kv_tokens")):
            if time.monotonic() > deadline:
                raise QuireError("no worker has reported the size of its KV cache")
            time.sleep(SAMPLE_S)
        return num_tokens

    def peaks(self) -> dict[str, float]:
        """The most KV blocks that ever were in use, the most sequences that ran at the same time, and how many were
        preempted; waits until the last report must have come. `live_rows`: of all rows that were computed to draw a
        token the share of those for sequences that had not ended."""
        time.sleep(REPORT_LAG_S)
        drawn, padded = self._gauge("vllm:generation_tokens_total"), self._gauge("quire:padded_rows_total")
        peaks = {name: self._gauge(f"quire:{name}") for name in ("most_blocks_used", "most_running")}
        peaks["num_preemptions"] = self._gauge("vllm:num_preemptions_total")
        return peaks | {"live_rows": drawn / max(1, drawn + padded)}

    def gauges(self) -> dict[str, float]:
        """The first value of each of the gateway's metrics; nothing if they cannot be had."""
        try:
            with _opener.open(f"{self.url}/metrics", timeout=5) as response:
                lines = response.read().decode().splitlines()
        except OSError:
            return {}
        values: dict[str, float] = {}
        for line in lines:
            name, brace, _ = line.partition("{")
            if brace and not line.startswith("#"):
                values.setdefault(name, float(line.rpartition(" ")[2]))
        return values

    def _gauge(self, name: str) -> int:
        return int(self.gauges().get(name, 0))

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


class Watch(ABC):
    """Looks at a cell four times a second within a `with` block, in a thread."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

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
            self.look(self._served)

    @abstractmethod
    def look(self, served: ServedModel) -> None:
        """Note what is there now."""


class BlockWatch(Watch):
    """Notes the most KV blocks that were in use."""

    most = 0

    def look(self, served: ServedModel) -> None:
        """Note the blocks in use."""
        self.most = max(self.most, served.num_blocks_used())


class SlotWatch(Watch):
    """Notes, while somebody waits for memory, how much of it holds tokens."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served)
        self._of_used: list[float] = []
        self._of_all: list[float] = []

    def look(self, served: ServedModel) -> None:
        """Note both shares, if anybody waits."""
        found = served.gauges()
        if found.get("vllm:num_requests_waiting", 0) > 0 and found.get("vllm:num_blocks_used", 0) > 0:
            self._of_used.append(found["quire:kv_slot_utilization"])
            self._of_all.append(found["quire:kv_slot_utilization"] * found["vllm:kv_cache_usage_perc"])

    def shares(self) -> dict[str, float]:
        """Means over time: of the token slots in blocks in use, and of all there are, those that held a token."""
        return {"live_of_used": _mean(self._of_used), "live_of_all": _mean(self._of_all)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
