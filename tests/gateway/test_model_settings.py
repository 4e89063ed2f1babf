"""What a model's author and its flags say of requests: sampling, end tokens, names, another tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import AddedToken

from shared import config as settings
from shared.config import GatewayConfig, ModelConfig, WorkerConfig
from shared.errors import ConfigError
from shared.messages import SamplingParams
from shared.model_card import read_card
from shared.model_files import ModelFiles
from tests.gateway.conftest import Site, SiteMaker
from tests.gateway.tiny_model import BOS, END, make_model_folder, make_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
AUTHOR = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 7,
    "do_sample": True,
    "eos_token_id": [3, 5],
    "transformers_version": "5",
}


def make_folder(path: Path, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    """A model folder with a generation_config.json."""
    folder = make_model_folder(path, **config)
    if generation is not None:
        (folder / "generation_config.json").write_bytes(orjson.dumps(generation))
    return folder


async def sampling_of(site: Site, path: str, body: dict[str, Any]) -> SamplingParams:
    """What the worker is asked for."""
    status, answer = await site.post(path, body)
    assert status == 200, answer
    return site.worker.bodies[-1].sampling


def shown(sampling: SamplingParams) -> tuple[float, ...]:
    return (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty)


async def test_absent_fields_are_the_authors(make_site: SiteMaker, tmp_path: Path) -> None:
    """Where a request says nothing, or null, it should get what generation_config.json says; what it says counts."""
    site = await make_site(folder=make_folder(tmp_path / "tiny", AUTHOR))
    for body in (HELLO, HELLO | {"temperature": None, "top_k": None, "max_tokens": None}):
        sampling = await sampling_of(site, CHAT, body)
        assert shown(sampling) == (0.6, 0.9, 20, 0.05, 1.1)
        assert sampling.max_tokens == 7
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 9}
    sampling = await sampling_of(site, CHAT, HELLO | own)
    assert (shown(sampling), sampling.max_tokens) == ((0.0, 1.0, 0, 0.0, 1.0), 9)
    assert (await sampling_of(site, CHAT, HELLO | {"top_k": -1})).top_k == 0
    assert (await sampling_of(site, COMPLETIONS, {"prompt": "hi"})).max_tokens == 7


async def test_a_model_without_wishes_gets_ours(site: Site) -> None:
    """Without a generation_config.json sampling should be OpenAI's."""
    assert shown(await sampling_of(site, CHAT, HELLO)) == (1.0, 1.0, 0, 0.0, 1.0)


async def test_the_flag_names_another_folder_or_none(make_site: SiteMaker, tmp_path: Path) -> None:
    """`--generation-config vllm` should leave the author's sampling out, not his end tokens; a folder replaces both."""
    folder = make_folder(tmp_path / "tiny", AUTHOR)
    end = make_tokenizer().token_to_id(END)
    site = await make_site(folder=folder, generation_config="vllm")
    sampling = await sampling_of(site, CHAT, HELLO)
    assert shown(sampling) == (1.0, 1.0, 0, 0.0, 1.0)
    assert sampling.stop_token_ids == (3, 5, end)
    other = make_folder(tmp_path / "other", {"temperature": 0.1})
    site = await make_site(folder=folder, generation_config=str(other))
    sampling = await sampling_of(site, CHAT, HELLO)
    assert shown(sampling) == (0.1, 1.0, 0, 0.0, 1.0)
    assert sampling.stop_token_ids == (end,)


@pytest.mark.parametrize("named", [[3, 5], 3, None])
async def test_all_end_tokens_end_an_answer(make_site: SiteMaker, tmp_path: Path, named: Any) -> None:
    """Each token that generation_config.json names, or else config.json, should end an answer, and the tokenizer's."""
    end = make_tokenizer().token_to_id(END)
    site = await make_site(folder=make_folder(tmp_path / "tiny", {"eos_token_id": named}, eos_token_id=[7, 8]))
    expected = {None: (7, 8, end), 3: (3, end)}.get(named if named != [3, 5] else 0, (3, 5, end))
    assert (await sampling_of(site, CHAT, HELLO)).stop_token_ids == expected
    assert (await sampling_of(site, CHAT, HELLO | {"ignore_eos": True})).stop_token_ids == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tokenizer": "/nowhere"}, "--tokenizer /nowhere: not a folder with a tokenizer.json"),
        ({"generation_config": "/nowhere"}, "--generation-config=/nowhere: not a folder with a generation_config.json"),
    ],
)
def test_wrong_folders_are_named(tmp_path: Path, flags: dict[str, str], message: str) -> None:
    """A folder that lacks the file should be refused with the flag that named it."""
    with pytest.raises(ConfigError, match=message):
        read_card(ModelFiles(model=make_folder(tmp_path / "tiny"), **flags))


@pytest.mark.parametrize("service", [GatewayConfig, WorkerConfig])
def test_a_revision_is_refused_with_the_reason(service: Any) -> None:
    """There is no hub to fetch a revision from."""
    with pytest.raises(ConfigError, match="--revision=main: a model is a folder here and nothing is fetched"):
        settings.load(service, ["m", "--revision", "main"], program="test")


async def test_another_tokenizer_serves_the_model(make_site: SiteMaker, tmp_path: Path) -> None:
    """`--tokenizer` should bring its own words and template; a word that the model has no row for is a 400."""
    folder = make_folder(tmp_path / "tiny")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(f"zz{i}", normalized=False) for i in range(12)])  # ten rows are padding
    other = make_model_folder(tmp_path / "other", template="{{ messages[0].content }}")
    (other / "config.json").unlink()
    tokenizer.save(str(other / "tokenizer.json"))
    site = await make_site(folder=folder, tokenizer=str(other))
    await sampling_of(site, CHAT, {"messages": [{"role": "user", "content": "zz3"}]})
    assert site.worker.bodies[-1].prompts == ((tokenizer.token_to_id("zz3"),),)
    for path, body in ((COMPLETIONS, {"prompt": "zz11"}), (CHAT, {"messages": [{"role": "user", "content": "zz11"}]})):
        status, answer = await site.post(path, body)
        assert status == 400
        assert "the model has " in answer["error"]["message"]


async def test_all_served_names_are_answered(make_site: SiteMaker, tmp_path: Path) -> None:
    """Each name should be listed and answered by itself, the first one where a request names none, and no other."""
    names = ("first", "org/second")
    site = await make_site(folder=make_folder(tmp_path / "tiny"), served_model_name=names,
                           worker={"model": "first"})  # fmt: skip
    _, listed = await site.get("/v1/models")
    assert tuple(card["id"] for card in listed["data"]) == names
    for asked, answered in ((None, "first"), ("first", "first"), ("org/second", "org/second")):
        _, answer = await site.post(COMPLETIONS, {"prompt": "hi"} | ({} if asked is None else {"model": asked}))
        assert answer["model"] == answered
    assert (await site.get("/v1/models/org%2Fsecond"))[0] == 200
    for wrong in ("tiny", "", BOS):
        status, answer = await site.post(COMPLETIONS, {"prompt": "hi", "model": wrong})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_names_come_from_a_flag_or_a_list() -> None:
    """Several names should be given by repeating the flag."""
    config = settings.load(GatewayConfig, ["m", "--served-model-name", "a", "b"], program="test")
    assert config.model == ModelConfig(model="m", served_model_name=("a", "b"))
