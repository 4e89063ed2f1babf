"""Embeddings through the whole cell: equal to those of transformers, and none lost with its worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import torch
import torch.nn.functional as F
from transformers import AutoModel

from shared.ids import RequestId
from shared.redis_bus import open_bus
from tests.e2e.cell import Cell

StartCell = Callable[..., Cell]


async def embed(session: aiohttp.ClientSession, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
    async with session.post(f"{cell.url}/v1/embeddings", json={"input": prompts}) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def attempts_of(cell: Cell, request_ids: list[str]) -> list[int]:
    bus = open_bus(cell.redis_url)
    records = await bus.load_records([RequestId(name) for name in request_ids])
    await bus.close()
    return [record.attempt for record in records if record is not None]


async def test_embeddings_survive_their_worker(start_cell: StartCell, model_folder: Path) -> None:
    """Embeddings of long inputs should be those of transformers, also where the worker that had them was killed."""
    cell = start_cell("--workers=2", "--max-num-batched-tokens=16")
    rng = random.Random(3)
    prompts = [[rng.randrange(300) for _ in range(rng.randrange(20, 900))] for _ in range(24)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        running = [asyncio.create_task(embed(session, cell, prompts[i : i + 3])) for i in range(0, 24, 3)]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        cell.kill("worker-0")
        answers = await asyncio.gather(*running)
    assert sorted(set(await attempts_of(cell, [answer["id"] for answer in answers]))) == [1, 2]
    vectors = [item["embedding"] for answer in answers for item in answer["data"]]
    model = AutoModel.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        hidden = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    for vector, expected in zip(vectors, hidden, strict=True):
        torch.testing.assert_close(torch.tensor(vector), F.normalize(expected, dim=-1), rtol=0, atol=5e-5)
