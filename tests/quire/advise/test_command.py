"""`quire advise` at the command line: what is wrong is told in one line, what is right printed or written as JSON."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator

import pytest

from quire import cli
from quire.advise import command

QUIRE = """# TYPE quire:workers gauge
quire:workers{model_name="m"} 2.0
quire:num_blocks{model_name="m"} 100.0
vllm:num_requests_waiting{model_name="m"} 3.0
vllm:num_requests_running{model_name="m"} 4.0
vllm:kv_cache_usage_perc{model_name="m"} 0.5
vllm:cache_config_info{block_size="16",enable_prefix_caching="False",cache_dtype="auto"} 1.0
quire:engine_config_info{device="cpu",dtype="bfloat16",max_num_seqs="2"} 1.0
vllm:time_to_first_token_seconds_count{model_name="m"} 10.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 9.0
"""
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a text at any path, with a status; gives the address."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(text: str | bytes, status: int = 200) -> str:
        data = text if isinstance(text, bytes) else text.encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def quick_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell without workers is not waited for as long as it would be."""
    monkeypatch.setattr(command, "REPORT_LAG_S", 0.3)


@pytest.mark.usefixtures("quick_lag")
@pytest.mark.parametrize(("text", "status", "said"), [
    ("", 200, "is empty"),
    ("\n \n", 200, "is empty"),
    ("<html>welcome</html>", 200, "not in Prometheus' text format"),
    (b"\xff\xfe\x00", 200, "not in Prometheus' text format"),
    ("node_cpu_seconds_total 5\n", 200, "no /metrics of a Quire cell"),
    (QUIRE.replace("2.0", "0.0"), 200, "no worker reports"),
    (QUIRE, 401, "401 Unauthorized; give --api-key"),
    (QUIRE, 404, "404 Not Found"),
])  # fmt: skip
def test_what_is_no_metrics_is_told_in_a_line(
    serve: Serve, capsys: pytest.CaptureFixture[str], text: str | bytes, status: int, said: str
) -> None:
    """Whatever stands at the address, the command should say in one line what is wrong, with exit code 1."""
    assert cli.main(["advise", f"--base-url={serve(text, status)}", "--seconds=0"]) == 1
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(("argv", "code", "said"), [
    (["--base-url=http://127.0.0.1:1"], 1, "cannot be read"),
    (["--base-url=http://no.such.host.invalid"], 1, "cannot be read"),
    (["--base-url=127.0.0.1:8000"], 2, "--base-url="),
    (["--base-url=http://x:1/v1"], 2, "without /v1"),
    (["--metrics-url=ftp://x/metrics"], 2, "--metrics-url="),
    (["--seconds=-1"], 2, "--seconds='-1'"),
])  # fmt: skip
def test_wrong_addresses_are_told_in_a_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, said: str
) -> None:
    """An address that is none is a wrong setting; one that does not answer is an error."""
    assert cli.main(["advise", *argv]) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_says_what_to_set(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """The advice should be printed in order, with flags, what was seen and what it gains."""
    assert cli.main(["advise", f"--base-url={serve(QUIRE)}", "--seconds=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "since the start: 2 workers, 4 running, 3 waiting, 50% of KV blocks in use" in lines[0]
    assert [line for line in lines if line[:1].isdigit()] == [
        "1. Prefix caching is off: turn it on  [prefix-cache-off]",
        "2. All 4 slots are taken while blocks are free: let more run at once  [batch-limit]",
    ]
    assert "   set   --max-num-seqs=4" in lines


def test_writes_json(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as JSON, with the numbers that it was judged by; two looks should give what came between them."""
    assert cli.main(["advise", f"--metrics-url={serve(QUIRE)}/metrics", "--seconds=0.01", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [advice["rule"] for advice in document["advice"]] == ["prefix-cache-off", "batch-limit"]
    assert document["advice"][0]["group"] == "prefix_caching"
    assert (document["snapshot"]["num_ttft"], document["snapshot"]["num_waiting"]) == (0, 3)


def test_several_gateways_are_added_up(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """What each gateway counts should be summed, what is the cell's taken once."""
    urls = [f"{serve(QUIRE)}/metrics", f"{serve(QUIRE.replace(' 9.0', ' 3.0'))}/metrics"]
    assert cli.main(["advise", "--metrics-url", *urls, "--seconds=0", "--json"]) == 0
    snapshot = json.loads(capsys.readouterr().out)["snapshot"]
    assert (snapshot["num_ttft"], snapshot["ttft_s"], snapshot["num_workers"]) == (20, 0.6, 2)


def test_nothing_to_say_is_said(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """A system in order should hear that, with exit code 0, and what could not be judged."""
    text = QUIRE.replace('"False"', '"True"').replace("waiting", "other").replace(" 9.0", " 1.0")
    assert cli.main(["advise", f"--base-url={serve(text)}", "--seconds=0"]) == 0
    shown = capsys.readouterr().out
    assert "Nothing to change" in shown
    assert "Not judged: nothing waits now" in shown
