"""Defaults of generation_config.json: for requests that are silent, and for those only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.model_folder import load_model_folder, read_model
from quire.api.client import Client
from quire.api.deployment import RunningDeployment
from shared.errors import ConfigError
from shared.messages import SamplingParams
from shared.model_card import read_card
from shared.model_files import ModelFiles
from tests.gateway.conftest import Site, SiteMaker
from tests.gateway.tiny_model import make_model_folder

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NAMED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}


def make_folder(path: Path, **generation: Any) -> Path:
    folder = make_model_folder(path / "tiny")
    (folder / "generation_config.json").write_bytes(orjson.dumps(generation | {"do_sample": False, "bos_token_id": 1}))
    return folder


async def sampled(site: Site, path: str, **fields: Any) -> SamplingParams:
    """How the worker was told to sample."""
    status, answer = await site.post(path, BODIES[path] | fields)
    assert status == 200, answer
    return site.worker.bodies[-1].sampling


def values(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in NAMED}


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_request_gets_the_models_defaults(make_site: SiteMaker, tmp_path: Path, path: str) -> None:
    """What a request does not say should be the model's, what it says its own; null is silence."""
    site = await make_site(folder=make_folder(tmp_path, **NAMED, max_new_tokens=5))
    silent = await sampled(site, path)
    assert (values(silent), silent.max_tokens) == (NAMED, 5)
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    told = await sampled(site, path, **own, max_tokens=7)
    assert (values(told), told.max_tokens) == (own, 7)
    assert values(await sampled(site, path, temperature=None, top_k=3)) == NAMED | {"top_k": 3}


async def test_a_default_length_is_shortened_to_what_fits(make_site: SiteMaker, tmp_path: Path) -> None:
    """A default longer than the context should be cut, never refused, and leave a completion its 16."""
    site = await make_site(folder=make_folder(tmp_path, max_new_tokens=100_000))
    num_prompt = len((await site.post("/tokenize", BODIES[CHAT]))[1]["tokens"])
    assert (await sampled(site, CHAT)).max_tokens == 512 - num_prompt
    assert (await sampled(site, COMPLETIONS)).max_tokens == 16


async def test_they_can_be_passed_over(make_site: SiteMaker, tmp_path: Path) -> None:
    """With `--generation-config vllm` the API's own defaults should hold."""
    site = await make_site(folder=make_folder(tmp_path, **NAMED, max_new_tokens=5), generation_config="vllm")
    silent = await sampled(site, COMPLETIONS)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.max_tokens) == (1.0, 1.0, 0, 16)


async def test_clients_are_told(make_site: SiteMaker, tmp_path: Path) -> None:
    """The model's card should hold them, and the Python API make its default parameters of them."""
    site = await make_site(folder=make_folder(tmp_path, **NAMED))
    _, models = await site.get("/v1/models")
    assert models["data"][0]["default_sampling_params"] == NAMED
    client = Client(RunningDeployment(site.base_url, None), "")
    params = await client.default_sampling_params()
    await client.close()
    assert {name: getattr(params, name) for name in NAMED} == NAMED
    assert params.max_tokens == 16


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_k", "many"), ("max_new_tokens", 0)])
def test_impossible_defaults_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    """A value that no request may have should stop the start, by file, name, value and remedy."""
    folder = make_folder(tmp_path, **{name: value})
    with pytest.raises(ConfigError, match=rf"generation_config.json: \w+={value}: .*--generation-config=vllm"):
        load_model_folder(folder)
    assert read_model(read_card(ModelFiles(model=folder, generation_config="vllm"))).defaults == {}
