"""`quire advise` on what nobody expects at its address: one line of what is wrong, or no more than what is known."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from quire import cli
from quire.advise import command
from quire.advise.rules import advise, open_questions
from quire.advise.snapshot import make_snapshot, read_samples
from shared.errors import QuireError
from tests.quire.advise.served import QUIRE, Serve, serve

__all__ = ["serve"]
Speak = Callable[..., str]
OK = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.fixture
def speak() -> Iterator[Speak]:
    """Says these bytes to whoever connects, over and over if `again`; gives the address."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def answer(listener: socket.socket, data: bytes, again: bytes) -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            connection.settimeout(10)
            connection.recv(2**16)
            connection.sendall(data)
            while again:
                connection.sendall(again)

    def start(data: bytes, again: bytes = b"") -> str:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        threads.append(threading.Thread(target=answer, args=(listeners[-1], data, again)))
        threads[-1].start()
        return f"http://127.0.0.1:{listeners[-1].getsockname()[1]}"

    yield start
    for listener, thread in zip(listeners, threads, strict=True):
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def hear(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line in which the command refuses."""
    assert cli.main(["advise", "--seconds=0", *argv]) in (1, 2)
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.isprintable() or shown.err[:-1].isprintable()
    return shown.err


@pytest.mark.parametrize(("data", "said"), [
    (b"-ERR unknown command 'GET'\r\n", "does not speak HTTP"),
    (b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak HTTP"),
    (b"", "cannot be read"),
    (b"HTTP/1.1 500 \x1b[31mred\r\n\r\n", "answers 500 ?[31mred"),
    (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/metrics\r\n\r\n", "302 Found; give the address"),
    (OK + QUIRE[: len(QUIRE) // 2].rpartition("\n")[0].encode(), "only a part of a gateway's /metrics"),
    (OK + QUIRE[: len(QUIRE) // 2].rpartition('"')[0].encode(), "not in Prometheus' text format"),
])  # fmt: skip
def test_what_is_no_gateway_is_told_in_a_line(
    speak: Speak, capsys: pytest.CaptureFixture[str], data: bytes, said: str
) -> None:
    """A server that speaks something else, one that points elsewhere, one that stops in the middle."""
    assert said in hear(capsys, f"--base-url={speak(data)}")


def test_an_answer_without_end_is_given_up(
    speak: Speak, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a very long answer nor one that takes very long, nor none, should be waited for."""
    assert "more than 8 MiB" in hear(capsys, f"--base-url={speak(OK, b'#' * 2**16)}")
    monkeypatch.setattr(command, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(command, "MAX_BYTES", 2**40)
    line = hear(capsys, f"--base-url={speak(OK, b'# slow')}")
    assert "it has not ended after 0.5 s" in line or "timed out" in line, "the latter where the machine stands still"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in hear(capsys, f"--base-url=http://127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("url", [
    "http://[::1", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://u:secret@127.0.0.1:1",
    "http://127.0.0.1:1?x=1", "http://127.0.0.1\x00", "http://a b", "http://é", "http://", "file:///etc/passwd",
])  # fmt: skip
def test_what_is_no_address_is_a_wrong_setting(capsys: pytest.CaptureFixture[str], url: str) -> None:
    """It should be named as one, and not be asked for."""
    line = hear(capsys, f"--base-url={url}")
    assert line.startswith(("quire: error: --base-url=", "quire: error: --metrics-url="))


@pytest.mark.parametrize("key", ["two\nlines", "ключ"])
def test_a_key_that_cannot_be_sent_is_not_shown(capsys: pytest.CaptureFixture[str], key: str) -> None:
    """It should be refused without being repeated."""
    assert hear(capsys, f"--api-key={key}") == "quire: error: --api-key: has characters that cannot be sent\n"


def read(text: str) -> tuple[list[str], list[str], tuple[str, ...]]:
    """The rules that speak, the notes, and the settings in which workers differ."""
    samples, settings = read_samples(text, "here")
    snapshot = make_snapshot(None, samples, settings, seconds=0)
    return [advice.rule for advice in advise(snapshot)], open_questions(snapshot), settings.differing


def test_workers_of_different_settings_are_said_to_be() -> None:
    """What all workers have should be judged, what they differ in be left out and named; not one worker's setting be
    taken for all, nor one's cache for the other's engine."""
    other = QUIRE.replace('max_num_seqs="2"', 'max_num_seqs="4"').splitlines()[-3:-2]
    assert "max_num_seqs" in other[0]
    rules, notes, differing = read(QUIRE + other[0] + "\n")
    assert (rules, differing) == (["prefix-cache-off", "ttft"], ("max_num_seqs",))
    assert notes[0] == "the workers are not set alike (max_num_seqs): rules that ask for these were left out"
    more = 'vllm:cache_config_info{block_size="8",enable_prefix_caching="True",cache_dtype="auto"} 1.0\n'
    rules, notes, differing = read(QUIRE + more)
    assert (rules, differing) == (["batch-limit"], ("block_size", "enable_prefix_caching"))
    same = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",cache_dtype="auto"} 1.0\n'
    assert read(QUIRE + same)[2] == ()


@pytest.mark.parametrize(("said", "given"), [
    ('"2"', '"1e400"'), ('"2"', '"nan"'), ('"2"', '"-2"'), ('"2"', '"9999999999999999"'), ('"2"', '"\\n2"'),
    ('"2"', '"\x1b[2J"'), ('max_num_seqs="2"', 'max_num_sequences="2"'),
])  # fmt: skip
def test_settings_that_are_none_are_missing(said: str, given: str) -> None:
    """A label that holds no setting should count as one that is not there."""
    rules, notes, _ = read(QUIRE.replace(said, given))
    assert rules == ["prefix-cache-off", "ttft"], "no slots are known, so the time to a first token is what there is"
    assert notes[0].startswith("the workers do not say how they are set")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_numbers_that_are_none_are_missing(value: str) -> None:
    """A series without a number should be named as one that is not there."""
    with pytest.raises(QuireError, match=r"without vllm:kv_cache_usage_perc$"):
        read(QUIRE.replace("} 0.5", "} " + value))
    with pytest.raises(QuireError, match="no /metrics of a Quire cell"):
        read(QUIRE.replace(" 2.0", " " + value))


@pytest.mark.parametrize("count", ["0.4", "-1"])
def test_less_than_a_worker_is_none(count: str) -> None:
    """Such counts should be no reason for advice, nor to divide by."""
    with pytest.raises(QuireError, match="no worker reports"):
        read(QUIRE.replace(" 2.0", " " + count))


def test_whatever_stands_there_is_read_or_refused() -> None:
    """Metrics with numbers from anywhere, lines lost and characters changed should give advice or an error of ours."""
    rng, outcomes = random.Random(5), set()
    for _ in range(500):
        lines = [line for line in QUIRE.splitlines() if rng.random() > 0.002]
        for _ in range(rng.randrange(6)):
            at = rng.randrange(len(lines))
            number = rng.choice(("0", "-1", "1e308", "NaN", "1e-308", "5", "1000000"))
            lines[at] = f"{lines[at].rpartition(' ')[0]} {number}"
        text = list("\n".join(lines) + "\n")
        for _ in range(rng.choice((0, 0, 0, 2))):
            text[rng.randrange(len(text))] = rng.choice('{}"\\ \n,=x9\x00')
        try:
            rules, notes, _ = read("".join(text))
            outcomes.add(bool(rules or notes))
        except QuireError as error:
            outcomes.add(str(error)[:12])
    assert len(outcomes) > 3


def test_one_gateway_named_twice_counts_once(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """The same address given again should not double what was counted there."""
    url = f"{serve(QUIRE)}/metrics"
    assert cli.main(["advise", "--metrics-url", url, url, "--seconds=0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["snapshot"]["num_ttft"] == 10


def test_what_is_slow_is_for_the_operator_to_say(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """A first token after 900 ms should be late by default, and in time where that is aimed at."""
    text = QUIRE.replace(" 4.0", " 3.0").replace(" 3.0\n", " 0.0\n")
    for flags, wanted in (((), ["prefix-cache-off", "ttft"]), (("--ttft-target-ms=1000",), ["prefix-cache-off"])):
        assert cli.main(["advise", f"--base-url={serve(text)}", "--seconds=0", "--json", *flags]) == 0
        assert [advice["rule"] for advice in json.loads(capsys.readouterr().out)["advice"]] == wanted
