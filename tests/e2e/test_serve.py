"""`quire serve` as a user runs it: from the command to streamed tokens, and to nothing left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from openai import OpenAI

from tests.e2e.cell import Cell
from tests.waiting import wait_until

StartCell = Callable[..., Cell]
MODEL = "test-llama"


@pytest.fixture
def client(cell: Cell) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def post(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer, without `[DONE]`, which must come last."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line.strip()[5:].strip() for line in response if line.startswith(b"data:")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_completion_streams_through_everything(cell: Cell) -> None:
    """A prompt of token ids should bring back exactly as many tokens as asked for, in more than one event."""
    body = {"model": MODEL, "prompt": list(range(300, 340)), "max_tokens": 24, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    events = post(f"{cell.url}/v1/completions", body)
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 24)
    assert len([event for event in events if event["choices"]]) > 2
    assert [c["finish_reason"] for event in events for c in event["choices"]][-1] == "length"


def test_streamed_text_equals_the_whole(client: OpenAI) -> None:
    """The same request should give the same text, usage and finish reason, streamed and not."""
    arguments: dict[str, Any] = {"model": MODEL, "prompt": "one two three", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**arguments)
    events = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].text == "".join(event.choices[0].text for event in events if event.choices)
    assert whole.usage == events[-1].usage
    assert whole.choices[0].finish_reason == [e for e in events if e.choices][-1].choices[0].finish_reason


def test_chat_with_the_official_client(client: OpenAI) -> None:
    """A chat, streamed and not, should work with OpenAI's client and agree with itself."""
    arguments: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}],
                                 "max_tokens": 16, "seed": 7}  # fmt: skip
    whole = client.chat.completions.create(**arguments)
    parts = [event.choices[0].delta for event in client.chat.completions.create(**arguments, stream=True)]
    assert parts[0].role == "assistant"
    assert whole.choices[0].message.content == "".join(part.content or "" for part in parts)
    assert whole.usage is not None
    assert 1 <= whole.usage.completion_tokens <= 16


def test_models_are_listed(client: OpenAI) -> None:
    """The served model should be listed under its folder's name."""
    assert [model.id for model in client.models.list()] == [MODEL]


def test_bench_measures_a_cell(cell: Cell, tmp_path: Path) -> None:
    """`quire bench serve` should find nothing wrong, and write figures with the machine they belong to."""
    out, work = tmp_path / "out.json", tmp_path / "work.jsonl"
    work.write_text('{"prompt": [300, 301, 302], "max_tokens": 5}\n' * 3)
    command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", cell.url, "--workload", str(work),
               "--repeats", "1", "--highest-token-id", "500", "--json", str(out)]  # fmt: skip
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    document = json.loads(out.read_text())
    assert document["results"][0]["median"]["requests"] == 3
    assert {"cpu", "cores", "commit", "packages"} <= document["machine"].keys()


def test_ctrl_c_leaves_nothing(start_cell: StartCell) -> None:
    """One SIGINT should end the launcher with 0, every child, and the private Redis' folder; a second start works."""
    for _ in range(2):
        cell = start_cell("--gateways=2", "--workers=2")
        folder = Path(cell.redis_url.removeprefix("unix://")).parent
        assert set(cell.pids) == {"redis", "scheduler", "worker-0", "worker-1", "gateway-0", "gateway-1"}
        assert len(set(cell.state["ports"])) == 2
        processes = cell.processes()
        assert len(processes) >= 6
        assert cell.stop() == 0, cell.log()[-3000:]
        assert "still at work" not in cell.log()
        assert [process for process in processes if process.is_running()] == []
        assert not folder.exists()


@pytest.mark.parametrize(("is_named", "when"), [(True, "always"), (False, "no")])
def test_only_a_named_data_folder_waits_for_the_disk(
    start_cell: StartCell, tmp_path: Path, is_named: bool, when: str
) -> None:
    """Redis should write through to the disk if its folder is kept, and not if nobody would come back to it."""
    cell = start_cell(*([f"--data-dir={tmp_path}"] if is_named else []))
    with redis.Redis.from_url(cell.redis_url) as client:
        assert client.config_get("appendfsync") == {"appendfsync": when}


def test_default_model_knows_the_capital_of_france(start_cell: StartCell) -> None:
    """Without a model named, SmolLM2 should answer the chat of the README, streamed, with the right text."""
    cell = start_cell("--kv-cache-memory-bytes=200000000", model=None)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "temperature": 0, "stream": True}
    events = post(f"{cell.url}/v1/chat/completions", body)
    deltas = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
    assert "".join(deltas) == "The capital of France is Paris."
    assert len(deltas) > 5


def test_killed_launcher_leaves_no_process(start_cell: StartCell) -> None:
    """kill -9 of the launcher should take all its children along."""
    cell = start_cell()
    processes = cell.processes()
    assert len(processes) >= 4
    cell.process.kill()
    cell.process.wait()
    assert psutil.wait_procs(processes, timeout=10)[1] == []


@pytest.mark.parametrize("name", ["worker-0", "scheduler", "gateway-0", "redis"])
def test_killed_service_comes_back(start_cell: StartCell, name: str) -> None:
    """Any service that is killed should be started again, and requests be served as before."""
    cell = start_cell()
    body = {"model": MODEL, "prompt": [300, 301], "max_tokens": 4, "ignore_eos": True, "temperature": 0, "stream": True}
    before = post(f"{cell.url}/v1/completions", body)
    cell.wait_restarted(name, cell.kill(name, signal.SIGKILL))
    wait_until(lambda: is_ready(cell.url), description="readiness", timeout_s=60)
    after = post(f"{cell.url}/v1/completions", body)
    assert text_of(after) == text_of(before)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_wrong_setting_of_a_service_ends_the_start(model_folder: Path) -> None:
    """What only a service can find wrong should end the launcher with 2 and the service's own message."""
    command = [sys.executable, "-m", "quire", "serve", str(model_folder), "--port=0", "--max-model-len=100000"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 2, answer.stderr[-3000:]
    assert "max-model-len" in answer.stderr


def test_taken_port_is_told_at_once(cell: Cell, model_folder: Path) -> None:
    """A port that is in use should be refused before anything is started."""
    port = cell.state["ports"][0]
    command = [sys.executable, "-m", "quire", "serve", str(model_folder), f"--port={port}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 2
    assert str(port) in answer.stderr
    assert "started" not in answer.stdout
