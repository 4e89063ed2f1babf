"""A model and its adapters in one cell: each is answered by its name, at every gateway and by every worker."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.cell import Cell
from tests.e2e.conftest import SMALL
from tests.e2e.reference import GreedyReference
from tests.e2e.test_equality import read_token_ids
from tests.e2e.test_families import write_model
from tests.faults.streams import follow
from tests.gpu_worker.lora.peft_files import load_model, merge, write_adapter
from tests.waiting import wait_until_async

NAMES = ("a", "b", "c")
NUM_TOKENS = 24
ADMIN = {"Authorization": "Bearer secret"}
PROMPT = [random.Random(3).randrange(300, 500) for _ in range(60)]


class Adapters:
    """Folders of adapters, and what a model draws with each; "": without."""

    def __init__(self, model_folder: Path, root: Path) -> None:
        self.root = root
        self.references = {"": GreedyReference(model_folder)}
        for seed, name in enumerate(NAMES):
            model = load_model(model_folder)
            folder = write_adapter(model, root / name, seed=seed, rank=4 + seed)
            merge(model, folder).save_pretrained(root / f"merged-{name}")
            self.references[name] = GreedyReference(root / f"merged-{name}")

    def who_drew(self, token_ids: list[int]) -> list[str]:
        """Which of them gives these tokens."""
        return [n for n, reference in self.references.items() if not reference.explain_mismatch(PROMPT, token_ids)]


@pytest.fixture(scope="module")
def adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(model_folder, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def cell(adapters: Adapters, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """Two gateways and a worker whose steps have two adapters at most; "a" is there from the start."""
    flags = ("--enable-lora", "--max-loras=2", "--max-lora-rank=8", f"--lora-modules=a={adapters.root / 'a'}",
             "--gateways=2", "--enable-lora-updates", "--admin-key=secret", f"--lora-dir={adapters.root}")  # fmt: skip
    running = Cell(model_folder, tmp_path_factory.mktemp("adapted"), *SMALL, *flags)
    yield running
    running.close()


def body_for(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip


async def change(session: aiohttp.ClientSession, cell: Cell, verb: str, **body: str) -> int:
    url = f"{cell.url}/v1/{verb}_lora_adapter"
    async with session.post(url, json={f"lora_{key}": value for key, value in body.items()}, headers=ADMIN) as response:
        return response.status


async def wait_names(session: aiohttp.ClientSession, cell: Cell, names: set[str]) -> None:
    async def are_everywhere() -> bool:
        found = []
        for url in cell.state["urls"]:
            async with session.get(f"{url}/v1/models") as response:
                found.append({card["id"] for card in (await response.json())["data"]})
        return all(names_there == {cell.model_name, *names} for names_there in found)

    await wait_until_async(are_everywhere, description=f"the adapters {names}", timeout_s=60)


async def draw(session: aiohttp.ClientSession, cell: Cell, models: list[str]) -> list[list[int]]:
    """Tokens for the prompt by each, asked at once, at the gateways in turns."""
    urls = cell.state["urls"]
    tasks = [follow(session, f"{urls[i % len(urls)]}/v1/completions", body_for(m)) for i, m in enumerate(models)]
    records = await asyncio.gather(*tasks)
    assert [record.ending for record in records] == ["done"] * len(models), [record.error for record in records]
    return await read_token_ids(cell.redis_url, {str(i): record for i, record in enumerate(records)})


async def test_each_adapter_answers_by_its_name(cell: Cell, adapters: Adapters) -> None:
    """Requests of a model and three adapters, more than fit one step, should each get what the merged weights give,
    again from the prefix cache, and again from a worker that came later; a reload should be another adapter, and one
    that does not fit fail alone."""
    async with aiohttp.ClientSession() as session:
        await wait_names(session, cell, {"a"})
        for name in ("b", "c"):
            assert await change(session, cell, "load", name=name, path=str(adapters.root / name)) == 200
        await wait_names(session, cell, set(NAMES))
        models = [cell.model_name, *NAMES] * 2
        expected = [["" if name == cell.model_name else name] for name in models]
        for _ in range(2):
            assert [adapters.who_drew(tokens) for tokens in await draw(session, cell, models)] == expected
        old = cell.kill("worker-0")
        await asyncio.to_thread(cell.wait_restarted, "worker-0", old)
        await wait_names(session, cell, set(NAMES))
        assert [adapters.who_drew(tokens) for tokens in await draw(session, cell, models)] == expected

        assert await change(session, cell, "load", name="b", path=str(adapters.root / "c")) == 200

        async def is_reloaded() -> bool:
            drawn = await draw(session, cell, ["b", "b"])
            return [adapters.who_drew(tokens) for tokens in drawn] == [["c"], ["c"]]

        await wait_until_async(is_reloaded, description="both gateways to know the new content", timeout_s=60)
        broken = shutil.copytree(adapters.root / "a", adapters.root / "broken")
        file = broken / "adapter_model.safetensors"
        save_file({name: tensor[:, 1:].contiguous() for name, tensor in load_file(file).items()}, file)
        assert await change(session, cell, "load", name="broken", path=str(broken)) == 200
        async with session.post(f"{cell.url}/v1/completions", json=body_for("broken") | {"stream": False,
                                "stream_options": None}) as response:  # fmt: skip
            assert (response.status, json.loads(await response.text())["error"]["code"]) == (400, "invalid_adapter")
        assert adapters.who_drew((await draw(session, cell, ["a"]))[0]) == ["a"]
        for name in ("b", "c", "broken"):
            assert await change(session, cell, "unload", name=name) == 200
        await wait_names(session, cell, {"a"})


async def test_two_models_and_three_adapters_answer_by_their_names(
    start_cell: Callable[..., Cell], adapters: Adapters, model_folder: Path, tmp_path: Path
) -> None:
    """Each of two models and of the adapters that are theirs should be listed, and answer with its own tokens."""
    other = write_model("gemma3", tmp_path / "tiny-gemma3", model_folder)
    model = load_model(other)
    merge(model, write_adapter(model, tmp_path / "g", seed=7, rank=4)).save_pretrained(tmp_path / "merged-g")
    references = {model_folder.name: adapters.references[""], other.name: GreedyReference(other)}
    references |= {name: adapters.references[name] for name in ("a", "b")} | {
        "g": GreedyReference(tmp_path / "merged-g")
    }
    modules = [
        json.dumps({"name": name, "path": str(folder), "base_model_name": base})
        for name, folder, base in (
            ("a", adapters.root / "a", model_folder.name), ("b", adapters.root / "b", model_folder.name),
            ("g", tmp_path / "g", other.name),
        )
    ]  # fmt: skip
    cell = start_cell("--enable-lora", "--max-lora-rank=8", "--lora-modules", *modules, "--more-models", str(other))
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{cell.url}/v1/models") as response:
            cards = {card["id"]: card["parent"] for card in (await response.json())["data"]}
        bases = {"a": model_folder.name, "b": model_folder.name, "g": other.name}
        assert cards == {model_folder.name: None, other.name: None} | bases
        drawn = await draw(session, cell, list(references))
    for name, tokens in zip(references, drawn, strict=True):
        assert references[name].explain_mismatch(PROMPT, tokens) == "", name
    assert len({tuple(tokens) for tokens in drawn}) == len(references)
