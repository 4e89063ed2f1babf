"""Adapters at the gateway: named in requests, listed, loaded and unloaded by those who may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.adapters import content_hash
from shared.bus import Bus
from shared.errors import ConfigError
from shared.messages import AdapterCard
from shared.prefix import PrefixNames, pack, scope_of
from tests.gateway.conftest import TEXT, Site, SiteMaker
from tests.waiting import wait_until_async

ADMIN = {"headers": {"Authorization": "Bearer admin"}}
BODY = {"prompt": "hi", "max_tokens": 50, "temperature": 0}


def make_adapter(folder: Path, weights: str = "w") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(weights)
    return folder


async def make_open_site(make_site: SiteMaker, root: Path, **settings: Any) -> Site:
    """One where adapters below `root` may be loaded."""
    settings = {"enable_lora_updates": True, "admin_key": "admin", "lora_dir": (str(root),),
                "worker": {"max_loras": 2, "has_prefix_cache": True}} | settings  # fmt: skip
    return await make_site(**settings)


async def load(site: Site, name: str, path: Path, **more: Any) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": str(path)} | more
    async with site.http.post(site.base_url + "/v1/load_lora_adapter", json=body, **ADMIN) as response:
        return response.status, await response.text()


async def unload(site: Site, name: str) -> int:
    url = site.base_url + "/v1/unload_lora_adapter"
    async with site.http.post(url, json={"lora_name": name}, **ADMIN) as response:
        return response.status


async def names_at(site: Site) -> list[str]:
    return [card["id"] for card in (await site.get("/v1/models"))[1]["data"]]


async def test_an_adapter_is_served_by_its_name(bus: Bus, make_site: SiteMaker, tmp_path: Path) -> None:
    """A loaded adapter should be listed with its parent, a request with its name reach a worker with hash and folder,
    and its prefixes be named apart from the model's; another gateway should know it, too, until it is unloaded."""
    folder = make_adapter(tmp_path / "sql")
    site = await make_open_site(make_site, tmp_path, bus=bus)
    other = await make_site(bus=bus, leads=False, worker={"model": "idle", "fingerprint": "idle"})
    assert await load(site, "sql", folder) == (200, "Success: LoRA adapter 'sql' added successfully.")
    model, adapter = (await site.get("/v1/models"))[1]["data"]
    assert (model["parent"], adapter["id"], adapter["parent"], adapter["root"]) == (None, "sql", "tiny", "sql")
    status, answer = await site.post("/v1/completions", BODY | {"model": "sql", "prompt": [5] * 40})
    assert (status, answer["model"], answer["choices"][0]["text"]) == (200, "sql", TEXT)
    (body,) = site.worker.bodies
    assert (body.adapter, body.adapter_path) == (content_hash(folder), str(folder.resolve()))
    names: list[bytes] = []
    maker = PrefixNames(await bus.prefix_key(), 16)
    maker.extend(names, maker.root(scope_of("anyone", "", body.adapter)), [5] * 40)
    assert site.app.gateway.prefixes.name(body, "anyone", 16) == (pack(names),)

    async def has_heard() -> bool:
        return "sql" in await names_at(other)

    await wait_until_async(has_heard, description="the other gateway to know it")
    assert (await other.post("/v1/completions", BODY | {"model": "sql"}))[0] == 200
    assert await unload(site, "sql") == 200
    assert await unload(site, "sql") == 404
    assert await names_at(site) == ["tiny"]
    status, answer = await site.post("/v1/completions", BODY | {"model": "sql"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_reload_is_another_content(make_site: SiteMaker, tmp_path: Path) -> None:
    """Other files under an old name should give requests another hash, hence other prefixes."""
    site = await make_open_site(make_site, tmp_path)
    for weights in ("one", "two"):
        assert (await load(site, "sql", make_adapter(tmp_path / "sql", weights)))[0] == 200
        assert (await site.post("/v1/completions", BODY | {"model": "sql"}))[0] == 200
    first, second = site.worker.bodies
    assert first.adapter != second.adapter


async def test_only_folders_that_were_opened_are_read(make_site: SiteMaker, tmp_path: Path) -> None:
    """A folder elsewhere should be refused with the same words whether it is there or not, also through links and
    dots; in an open folder the error should say what is missing."""
    opened, known = tmp_path / "open", make_adapter(tmp_path / "known")
    make_adapter(opened / "fine")
    outside = make_adapter(tmp_path / "outside")
    (opened / "link").symlink_to(outside)
    site = await make_open_site(make_site, opened, lora_modules=(f"known={known}",))
    texts = set()
    for path in (outside, tmp_path / "none", opened / "link", opened / ".." / "outside", Path("/etc"), Path("\x00")):
        status, text = await load(site, "x", path)
        assert status == 400
        texts.add(text)
    assert len(texts) == 1
    assert "--lora-dir" in texts.pop()
    status, text = await load(site, "x", opened / "none")
    assert status == 400
    assert "adapter_config.json" in json.loads(text)["error"]["message"]
    for path in (known, opened / "fine"):
        assert (await load(site, "x", path))[0] == 200


async def test_only_who_has_the_admin_key_may_change_adapters(make_site: SiteMaker, tmp_path: Path) -> None:
    """A client's key should not do, nor none; without the flag there is no such route."""
    folder = make_adapter(tmp_path / "sql")
    body = {"lora_name": "sql", "lora_path": str(folder)}
    site = await make_open_site(make_site, tmp_path, api_key=("client",))
    for headers in ({}, {"Authorization": "Bearer client"}):
        assert (await site.post("/v1/load_lora_adapter", body, headers=headers))[0] == 401
    assert (await load(site, "sql", folder))[0] == 200
    assert (await site.post("/v1/completions", BODY, **ADMIN))[0] == 401
    closed = await make_site()
    assert (await closed.post("/v1/load_lora_adapter", body, **ADMIN))[0] == 404


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora_name": "tiny"}, "a model is called 'tiny'"),
        ({"lora_name": ""}, "lora_name: must be given"),
        ({"lora_name": "a\nb"}, "printable"),
        ({"lora_path": None}, "lora_path: must be given"),
        ({"base_model_name": "huge"}, "'huge' is not served"),
        ({"base_model_name": "sql"}, "is an adapter itself"),
    ],
)
async def test_what_cannot_be_registered_is_named(
    make_site: SiteMaker, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    """The error should name the field and what is wrong."""
    folder = make_adapter(tmp_path / "sql")
    site = await make_open_site(make_site, tmp_path)
    assert (await load(site, "sql", folder))[0] == 200
    status, answer = await load(site, "new", folder, **changes)
    assert status in (400, 404)
    assert text in answer


async def test_adapters_need_workers_that_take_them(bus: Bus, make_site: SiteMaker, tmp_path: Path) -> None:
    """Where no worker of the model has adapters, one should not be listed, and its requests be put off."""
    site = await make_site(bus=bus)
    await bus.put_adapter(AdapterCard(name="sql", model="tiny", path=str(tmp_path), content="0" * 32))
    await bus.put_adapter(AdapterCard(name="far", model="unknown", path=str(tmp_path), content="0" * 32))
    await site.app.gateway.adapters.read()
    assert await names_at(site) == ["tiny"]
    status, answer = await site.post("/v1/completions", BODY | {"model": "sql"})
    assert (status, answer["error"]["code"]) == (503, "no_worker")
    assert (await site.post("/v1/completions", BODY | {"model": "far"}))[0] == 404


async def test_a_folder_of_the_settings_must_be_there(make_site: SiteMaker, tmp_path: Path) -> None:
    """A gateway should not start with a folder that cannot hold adapters."""
    with pytest.raises(ConfigError, match=r"--lora-dir=.*none: there is no such folder"):
        await make_open_site(make_site, tmp_path / "none")
