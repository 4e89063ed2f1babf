"""`quire advise` at the command line: what is wrong is told in one line, what is right printed or written as JSON."""

from __future__ import annotations

import json

import pytest

from quire import cli
from quire.advise import command
from tests.quire.advise.served import QUIRE, Serve, serve

__all__ = ["serve"]


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
    ("quire:workers 2\n", 200, "only a part of a gateway's /metrics, without vllm:num_requests_running, vllm:num_req"),
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
    text = QUIRE.replace('"False"', '"True"').replace(" 3.0", " 0.0").replace(" 9.0", " 1.0")
    assert cli.main(["advise", f"--base-url={serve(text)}", "--seconds=0"]) == 0
    shown = capsys.readouterr().out
    assert "Nothing to change" in shown
    assert "Not judged: nothing waits now" in shown
