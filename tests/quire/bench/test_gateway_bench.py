"""`quire bench gateway` on a tiny workload: it runs, checks its answers, and writes all figures."""

from __future__ import annotations

import json
import os

import pytest

from quire.bench import gateway
from quire.bench.cpu_time import main_thread_cpu_s, process_cpu_s
from quire.bench.stream_client import StreamAnswer
from shared.errors import ConfigError

PARTS = {"gateway", "scheduler", "worker loop", "worker engine", "redis"}
TINY = ["--streams", "1", "3", "--tokens", "6", "--step-ms=1", "--rounds=1", "--requests=4", "--concurrency=2",
        "--idle-s=0.1", "--gateways=2"]  # fmt: skip


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The JSON of one run."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    assert gateway.main([*TINY, f"--json={path}"]) == 0
    found: dict[str, object] = json.loads(path.read_text())
    return found


def test_all_figures_are_written(document: dict[str, object]) -> None:
    """Each load should have its figures, each part of the cell its CPU time, and no answer be wrong."""
    results = document["results"]
    assert isinstance(results, dict)
    assert results["errors"] == []
    assert [(run["streams"], run["tokens"]) for run in results["streams"]] == [(1, 6), (3, 18)]
    tables = [results["requests"]["us_per_request"], results["idle"]["ms_per_s"]]
    tables += [run["us_per_token"] for run in results["streams"]]
    for table in tables:
        assert table.keys() == PARTS
        assert all(value >= 0 for value in table.values())
    assert results["first"]["ttft_ms_p99"] >= results["first"]["ttft_ms_p50"] > 0
    assert results["requests"]["dispatches_per_core_s"] > 0
    assert {"settings", "machine"} <= document.keys()


def test_several_gateways_share_the_streams(document: dict[str, object]) -> None:
    """With two gateways both should have worked."""
    results = document["results"]
    assert isinstance(results, dict)
    shares = results["streams"][1]["gateway_shares"]
    assert len(shares) == 2
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(1.0)


def test_the_table_names_every_part(document: dict[str, object]) -> None:
    """The table for the terminal should show each load, and what went wrong."""
    results = document["results"]
    assert isinstance(results, dict)
    table = gateway.format_report(results | {"errors": ["another text came"]})
    loads = ("3 streams, µs a token", "one request, µs", "idle, ms a second", "TTFT", "requests/s")
    for words in (*PARTS, *loads, "FAILED: another text came"):
        assert words in table


def test_a_file_that_cannot_be_written_is_refused_first() -> None:
    """A wrong --json should be said before anything is measured."""
    with pytest.raises(ConfigError, match="its folder is not there"):
        gateway.main(["--json=/nowhere/figures.json"])


def test_cpu_time_is_that_of_the_process() -> None:
    """What this process computes should show in its own CPU time, and mostly in its main thread's."""
    before, main_before = process_cpu_s(os.getpid()), main_thread_cpu_s(os.getpid())
    while process_cpu_s(os.getpid()) - before < 0.05:
        sum(range(10_000))
    assert main_thread_cpu_s(os.getpid()) > main_before
    assert process_cpu_s(os.getpid()) >= main_thread_cpu_s(os.getpid())


async def test_only_a_whole_stream_counts() -> None:
    """An answer should be read over its chunks, and one that is no whole stream refused."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    whole = StreamAnswer(b"")
    for data in (head + b'f\r\ndata: {"a": 1}\n\r\n', b"1\r\n\n\r\n", b"e\r\ndata: [DONE]\n\n\r\n0\r\n", b"\r\n"):
        whole.data_received(data)
    await whole.wait()
    assert whole.events() == [{"a": 1}]
    for data in (b"HTTP/1.1 503 No\r\n\r\n0\r\n\r\n", head + b"9\r\ndata: {}\n\r\n0\r\n\r\n"):
        broken = StreamAnswer(b"")
        broken.data_received(data)
        await broken.wait()
        with pytest.raises(ValueError, match="stream"):
            broken.events()
