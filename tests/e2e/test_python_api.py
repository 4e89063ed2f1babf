"""`from quire import LLM` as callers have it: private services, a running deployment, and how both end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.api.metrics import Gauge
from shared.errors import ArgumentError, DeploymentError
from tests.e2e.cell import Cell
from tests.e2e.reference import GreedyReference
from tests.faults.checker import check_at_rest
from tests.gpu_worker.lora.peft_files import load_model, merge, write_adapter
from tests.waiting import wait_until

SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 4_000_000, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["Hello there", "one two three", "What is"]


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    """One with services of its own."""
    with LLM(model=str(model_folder), tensor_parallel_size=1, disable_log_stats=False, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def remote(cell: Cell) -> Iterator[LLM]:
    """One of the deployment that all tests of the module share."""
    with LLM(base_url=f"{cell.url}/v1", api_key="any") as llm:
        yield llm


def children(llm: LLM) -> list[psutil.Process]:
    """The launcher of an LLM's own services, and all that it has started."""
    launcher = psutil.Process(llm._deployment.pid)  # type: ignore[union-attr]
    return [launcher, *launcher.children(recursive=True)]


def ids_of(outputs: Any) -> list[Any]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def test_both_ways_give_the_same(llm: LLM, remote: LLM) -> None:
    """Private services and a running deployment should give the same tokens, greedy and seeded, in prompts' order."""
    for params in (GREEDY, SamplingParams(temperature=1, seed=3, n=2, max_tokens=8, logprobs=1)):
        outputs = [one.generate(PROMPTS, params, use_tqdm=False) for one in (llm, remote)]
        assert ids_of(outputs[0]) == ids_of(outputs[1])
        assert [output.prompt for output in outputs[0]] == PROMPTS
        assert all(output.finished and len(output.outputs) == params.n for output in outputs[0])


def test_all_spellings_of_a_prompt_are_the_same(llm: LLM) -> None:
    """Text, token ids and dicts of either should give the same output."""
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    spellings: list[Any] = [PROMPTS[0], {"prompt": PROMPTS[0], "lora_request": None}, {"prompt_token_ids": ids}, ids]
    outputs = llm.generate(spellings, GREEDY, use_tqdm=False)
    older = llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY, use_tqdm=False)
    assert ids_of(outputs) == ids_of(older) * 4
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    """A list of parameters should be for the prompts in turn; another number of them an error."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(ids) for ids in ids_of(outputs)] == [1, 2, 3]
    with pytest.raises(ValueError, match="sampling_params: 2 of them for 3 prompts"):
        llm.generate(PROMPTS, params[:2])


def test_chat(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversation or several should be answered through the chat template, with a bar for those who want one."""
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, GREEDY)
    assert "1/1" in capsys.readouterr().err
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    assert ids_of(two) == ids_of([one]) * 2
    assert one.prompt == llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_bar_of_the_callers_own(llm: LLM) -> None:
    """`use_tqdm` may be a class in the way of tqdm's, which is told of each prompt."""
    told: list[Any] = []

    class Bar:
        def __init__(self, *, total: int, desc: str) -> None:
            told.append(total)

        def update(self, n: int) -> None:
            told.append(n)

        def close(self) -> None:
            told.append("closed")

    llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert told == [3, 1, 1, 1, "closed"]


def test_metrics_are_the_deployments(llm: LLM) -> None:
    """`get_metrics` should hold what /metrics does, under vLLM's names."""
    names = {metric.name for metric in llm.get_metrics()}
    assert {"vllm:num_requests_running", "vllm:generation_tokens", "vllm:time_to_first_token_seconds"} <= names


def test_adapters_are_loaded_from_where_they_lie(llm: LLM, model_folder: Path, tmp_path: Path) -> None:
    """A LoRARequest should have its adapter loaded, for all prompts or for some of a call, and give what weights with
    it merged into them give; without enable_lora it is refused in the caller's words."""
    model = load_model(model_folder)
    folder = write_adapter(model, tmp_path / "sql", seed=1, rank=4)
    merge(model, folder).save_pretrained(tmp_path / "merged")
    adapter, reference = LoRARequest("sql", 1, str(folder)), GreedyReference(tmp_path / "merged")
    with LLM(model=str(model_folder), enable_lora=True, max_loras=4, max_lora_rank=64, **SMALL) as adapted:
        plain, *some = adapted.generate(
            [PROMPTS[0], {"prompt": PROMPTS[0], "lora_request": adapter}], GREEDY, use_tqdm=False
        )
        some += adapted.generate(PROMPTS[:1], GREEDY, lora_request=adapter, use_tqdm=False)
        assert ids_of([plain]) == ids_of(llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False))
        for output in some:
            assert output.lora_request == adapter
            assert reference.explain_mismatch(output.prompt_token_ids, output.outputs[0].token_ids) == ""
        assert ids_of(some) != ids_of([plain]) * 2
        with pytest.raises(ValueError, match=r"lora_path: .*/nowhere"):
            adapted.generate("x", GREEDY, lora_request=LoRARequest("none", 2, "/nowhere"))
    with pytest.raises(ValueError, match=r"lora_request: no adapter 'sql' is served.* enable_lora=True"):
        llm.generate("x", GREEDY, lora_request=adapter)


async def test_streams_survive_a_gateway(llm: LLM) -> None:
    """A stream whose gateway is killed should go on at the next one, to the same end."""
    params = SamplingParams(temperature=1, seed=5, max_tokens=200, ignore_eos=True)
    expected = ids_of(llm.generate("Hello", params, use_tqdm=False))
    async with AsyncLLM(base_url=llm.base_url, api_key=llm.api_key) as streaming:
        num_outputs = 0
        async for output in streaming.generate("Hello", params, "0"):
            last = output
            num_outputs += 1
            if num_outputs == 3:
                (gateway,) = [process for process in children(llm) if "gateway" in process.cmdline()]
                gateway.kill()
    assert num_outputs > 3
    assert ids_of([last]) == expected


async def test_async_llm_streams(cell: Cell) -> None:
    """Outputs should come while tokens are computed, each with all so far."""
    async with AsyncLLM(base_url=cell.url) as streaming:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        lengths = [len(o.outputs[0].token_ids) async for o in streaming.generate({"prompt": "Hello"}, params, "0")]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 60
    assert len(lengths) > 10


def test_interrupted_calls_cancel_all_requests(cell: Cell, remote: LLM) -> None:
    """All prompts of a call should be in the cell at once; Ctrl-C should end them all there."""

    def num_in_cell() -> float:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(
            metric.value for metric in remote.get_metrics() if isinstance(metric, Gauge) and metric.name in names
        )

    def interrupt() -> None:
        wait_until(lambda: num_in_cell() >= 100, description="100 prompts are in the cell")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        remote.generate(["Hello"] * 120, params, use_tqdm=False)
    thread.join()
    asyncio.run(check_at_rest(cell.redis_url, cell.url, timeout_s=5))
    assert len(remote.generate("Hello", GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 2, "cpu_offload_gb": 0},
         "not supported in this version: pipeline_parallel_size=2"),
        ({"quantization": "awq"}, "quantization='?awq"),
        ({"max_model_len": 99_999}, "max_model_len=99999: the model"),
    ],
)  # fmt: skip
def test_refused_arguments_are_exceptions(model_folder: Path, arguments: dict[str, Any], words: str) -> None:
    """What the services refuse to start with should be a ValueError that names the argument."""
    with pytest.raises(ArgumentError, match=words):
        LLM(str(model_folder), **SMALL, **arguments)


def test_arguments_of_services_do_not_go_with_a_deployment() -> None:
    """A running deployment is set already; an address that is none is named."""
    with pytest.raises(ValueError, match=r"block_size: .*base_url run already"):
        LLM(base_url="http://127.0.0.1:9", block_size=16)
    with pytest.raises(ValueError, match=r"base_url='127.0.0.1:9': must begin with http"):
        LLM(base_url="127.0.0.1:9")
    with pytest.raises(ValueError, match=r"api_key: .*base_url"):
        LLM(api_key="x")


def test_dead_services_are_an_exception(model_folder: Path) -> None:
    """When its services die under a call, the caller should get an exception at once, and nothing be left."""
    llm = LLM(str(model_folder), **SMALL)
    processes = children(llm)
    killer = threading.Timer(0.3, processes[0].kill)
    killer.start()
    with pytest.raises(DeploymentError, match="the services of this object have ended"):
        llm.generate(["Hello"] * 64, SamplingParams(max_tokens=3000, ignore_eos=True), use_tqdm=False)
    killer.join()
    llm.shutdown()
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    with pytest.raises(ValueError, match="has been shut down"):
        llm.generate("Hello", GREEDY)


_HOLDER = """
import sys, time
from quire import LLM
llm = LLM(sys.argv[1], dtype="float32", kv_cache_memory_bytes=4_000_000, num_threads=1)
print(llm._deployment.pid, flush=True)
time.sleep(600)
"""


def test_services_die_with_python(model_folder: Path) -> None:
    """Nothing that a process started should outlive its `kill -9`."""
    command = [sys.executable, "-c", _HOLDER, str(model_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        launcher = psutil.Process(int(holder.stdout.readline()))
        processes = [launcher, *launcher.children(recursive=True)]
        assert len(processes) == 5
        holder.kill()
    assert psutil.wait_procs(processes, timeout=5)[1] == []
