"""The HTTP side against the hostile: headers, keys, paths, floods, and metrics that must not grow."""

from __future__ import annotations

import asyncio
import hmac
import io
import pickle
from pathlib import Path
from typing import Any

import pytest

from gateway import limits
from gateway.auth import KeyRing
from shared.errors import Unauthorized
from shared.ids import RequestId
from shared.prefix import PrefixNames, pack, scope_of
from tests.gateway.conftest import TEXT, Site, SiteMaker
from tests.waiting import wait_until_async

COMPLETIONS = "/v1/completions"


async def raw(site: Site, data: bytes, *, timeout_s: float = 10) -> bytes:
    """All bytes that the gateway answers to `data`, until it closes or nothing comes any more."""
    port = int(site.base_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(data)
            await writer.drain()
            return await reader.read(65536)
    finally:
        writer.close()


def head(path: str = COMPLETIONS, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *lines, "", ""]).encode()


@pytest.mark.case(10)
async def test_a_clients_request_id_is_ignored(site: Site) -> None:
    """Ids should be the server's: a client's is neither echoed nor copied into chunks."""
    async with site.http.post(
        site.base_url + COMPLETIONS, json={"prompt": "hi", "stream": True}, headers={"X-Request-Id": "z" * 4000}
    ) as response:
        text = await response.text()
        assert response.headers["X-Request-Id"].startswith("cmpl-")
    assert "zzzz" not in text
    answer = await raw(site, head(COMPLETIONS, "X-Request-Id: a\tb\xe9", "Content-Length: 2") + b"{}")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"\xe9" not in answer


@pytest.mark.case(10, 107)
async def test_a_header_of_a_megabyte_is_431(site: Site) -> None:
    """Large headers and floods of headers should be a 431 with an error object, whatever their name."""
    for lines in (["X-Request-Id: " + "a" * 2**20], [f"X-{i}: 1" for i in range(10_000)]):
        answer = await raw(site, head(COMPLETIONS, *lines))
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.0 431"))
        assert b"aiohttp" not in answer
        assert b'"code":"headers_too_large"' in answer
    await site.check_alive()


@pytest.mark.case(107)
async def test_a_body_that_is_too_large_is_413(make_site: SiteMaker) -> None:
    """A body beyond the limit should be a 413, whether it says its length or comes in endless chunks."""
    site = await make_site(max_body_bytes=2048)
    answer = await raw(site, head(COMPLETIONS, "Content-Length: 1000000000"))
    assert answer.startswith(b"HTTP/1.1 413")
    chunk = b"400\r\n" + b"a" * 1024 + b"\r\n"
    answer = await raw(site, head(COMPLETIONS, "Transfer-Encoding: chunked") + chunk * 50)
    assert answer.startswith(b"HTTP/1.1 413")
    await site.check_alive()


@pytest.mark.case(107)
async def test_a_slow_body_is_408(make_site: SiteMaker) -> None:
    """A body that does not come should be a 408 after --body-timeout-s."""
    site = await make_site(body_timeout_s=0.2)
    answer = await raw(site, head(COMPLETIONS, "Content-Length: 100") + b"{")
    assert answer.startswith(b"HTTP/1.1 408")
    await site.check_alive()


@pytest.mark.parametrize("data", [b"", head(COMPLETIONS)[:-2]])
async def test_headers_that_do_not_come_end_the_connection(
    make_site: SiteMaker, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """A client that sends nothing, or no end of its headers, should not hold a connection."""
    monkeypatch.setattr(limits, "IDLE_TIMEOUT_S", 0.2)
    site = await make_site()
    assert await raw(site, data) == b""
    await site.check_alive()


@pytest.mark.parametrize("data", [
    b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", head(COMPLETIONS, "Content-Length: 5", "Transfer-Encoding: chunked"),
    head(COMPLETIONS, "Content-Length: -1"), head(COMPLETIONS, "Bad Header")])  # fmt: skip
async def test_what_is_not_http_is_400(site: Site, data: bytes) -> None:
    """Broken requests should be a 400 or a closed connection, never more."""
    answer = await raw(site, data)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    await site.check_alive()


async def test_a_compressed_bomb_is_never_unpacked(make_site: SiteMaker) -> None:
    """A compressed body should be refused without being unpacked, whatever it would become."""
    import zlib

    site = await make_site(max_body_bytes=65536)
    for data in (zlib.compress(b"a" * 50_000_000), zlib.compress(b'{"prompt":"hi"}'), b"not compressed"):
        async with site.http.post(
            site.base_url + COMPLETIONS, data=io.BytesIO(data), headers={"Content-Encoding": "deflate"}
        ) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "unsupported_encoding"
    await site.check_alive()


async def test_a_flood_of_large_bodies_is_bounded(make_site: SiteMaker) -> None:
    """Large bodies on their way should count as they come, small ones pass beside them, and all be given back."""
    site = await make_site(max_body_bytes=2**20)
    budget, most = site.app.gateway.bodies, 8 * 2**20
    port = int(site.base_url.rpartition(":")[2])
    floods = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
    try:
        for _, writer in floods:
            writer.write(head(COMPLETIONS, f"Content-Length: {2**20}") + b" " * (2**20 - 1))

        async def is_refused() -> bool:
            return sum(len(reader._buffer) > 0 for reader, _ in floods) >= 3  # type: ignore[attr-defined]

        await wait_until_async(is_refused, description="refusals of the bodies beyond the budget")
        assert budget.num_bytes <= most
        answers = [await reader.read(2**16) for reader, _ in floods if reader._buffer]  # type: ignore[attr-defined]
        assert {answer[:12] for answer in answers} == {b"HTTP/1.1 503"}
        assert all(b"Retry-After" in answer for answer in answers)
        assert (await site.post(COMPLETIONS, {"prompt": "hi"}))[0] == 200
    finally:
        for _, writer in floods:
            writer.close()

    async def is_given_back() -> bool:
        return budget.num_bytes == 0

    await wait_until_async(is_given_back, description="the budget of bodies whose clients left")
    await site.check_alive()


@pytest.mark.case(104)
@pytest.mark.parametrize("path", [
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny", "/v1/streams/x", "/metrics",
    "/tokenize", "/detokenize", "//v1/models", "/V1/models", "/v1/models/", "/v1/%6dodels", "/%2e/health", "/health/",
    "/", "/docs", "/health/../v1/models", "/v1/models?x=/health"])  # fmt: skip
async def test_everything_but_probes_needs_the_key(make_site: SiteMaker, path: str) -> None:
    """Without the key every path, method and Host should be a 401, decided on the routed path."""
    site = await make_site(api_key=("secret",))
    for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
        answer = await raw(site, head(path, "Content-Length: 0", method=method))
        assert answer.startswith(b"HTTP/1.1 401"), (method, answer[:100])
    crafted = head(path, method="GET").replace(b"Host: x", b"Host: a/health?b")
    assert (await raw(site, crafted)).startswith((b"HTTP/1.1 401", b"HTTP/1.1 400"))


@pytest.mark.case(104)
async def test_probes_are_open_and_the_key_opens_the_rest(make_site: SiteMaker) -> None:
    """/health, /ready and /version should need no key; with it everything should work; near misses should not."""
    site = await make_site(api_key=("secret", "other"))
    for path in ("/health", "/ready", "/version"):
        assert (await site.get(path))[0] == 200
    for key in ("secret", "other"):
        assert (await site.get("/v1/models", headers={"Authorization": f"Bearer {key}"}))[0] == 200
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        "Basic secret",
        "secret",
        "Bearer Secret",
        "Bearer secret x",
        "Bearer sécret",
    ):
        status, answer = await site.get("/v1/models", headers={"Authorization": wrong})
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), wrong
    twice = head("/v1/models", "Authorization: Bearer secret", "Authorization: Bearer secret", method="GET")
    assert (await raw(site, twice)).startswith(b"HTTP/1.1 40")


@pytest.mark.case(105)
def test_keys_are_compared_in_constant_time_over_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong key should cost the same comparisons as a right one, each over digests of one length."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(one: Any, other: Any) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    ring = KeyRing(["a", "bb", "ccc"])
    ring.tenant(["Bearer a"])
    right = list(compared)
    for wrong in ("x", "a" * 100_000, ""):
        compared.clear()
        with pytest.raises(Unauthorized):
            ring.tenant([f"Bearer {wrong}"])
        assert compared == right == [(32, 32)] * 3


async def test_another_tenants_stream_is_404(make_site: SiteMaker) -> None:
    """A stream's id should open nothing for another key's holder, nor an idempotency key lead to it."""
    site = await make_site(api_key=("one", "two"))
    one, two = ({"Authorization": f"Bearer {key}", "Idempotency-Key": "k"} for key in ("one", "two"))
    body = {"prompt": "hi", "max_tokens": 50}
    async with site.http.post(site.base_url + COMPLETIONS, json=body, headers=one) as response:
        request_id = response.headers["X-Request-Id"]
    assert (await site.get(f"/v1/streams/{request_id}", headers=two))[0] == 404
    async with site.http.get(f"{site.base_url}/v1/streams/{request_id}", headers=one) as response:
        assert response.status == 200
    async with site.http.post(site.base_url + COMPLETIONS, json=body, headers=two) as response:
        assert response.headers["X-Request-Id"] != request_id


@pytest.mark.case(109)
async def test_a_pickle_is_only_a_bad_body(site: Site) -> None:
    """A pickled body should be refused as bad JSON."""
    status, _ = await site.post_raw(COMPLETIONS, pickle.dumps({"prompt": "hi"}))
    assert status == 400


@pytest.mark.case(109)
def test_no_pickle_in_the_gateway() -> None:
    """Nothing in the gateway should know pickles at all."""
    sources = list((Path(__file__).resolve().parents[2] / "gateway").rglob("*.py"))
    assert len(sources) > 20
    for path in sources:
        assert "pickle" not in path.read_text(), path


async def test_answers_cannot_be_sniffed(site: Site) -> None:
    """Every answer should say `nosniff` and its media type; errors be JSON without HTML."""
    for path in ("/health", "/nowhere", "/metrics", "/v1/models"):
        async with site.http.get(site.base_url + path) as response:
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "html" not in response.content_type
            assert "Server" not in response.headers
    status, answer = await site.get("/<script>")
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    status, answer = await site.get(COMPLETIONS)
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.case(111)
async def test_the_number_of_series_is_constant(site: Site) -> None:
    """Whatever clients send as model, path, user or id, /metrics should not gain a series."""

    async def series(scope: str) -> set[str]:
        async with site.http.get(f"{site.base_url}/metrics{scope}") as response:
            assert response.status == 200
            lines = (await response.text()).splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    before = await series(""), await series("?scope=process")
    for i in range(30):
        await site.post(COMPLETIONS, {"prompt": "hi", "model": f"model{i}"})
        await site.post(COMPLETIONS, {"prompt": "hi", "user": f"user{i}", "max_tokens": 1})
        await site.get(f"/path{i}")
        await site.get(f"/v1/streams/cmpl-{i:032x}")
    assert (await series(""), await series("?scope=process")) == before
    names = {line.partition("{")[0] for line in before[0]}
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc", "vllm:num_preemptions_total", "vllm:num_preemption",
            "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket",
            "vllm:time_per_output_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
            "vllm:e2e_request_latency_seconds_bucket", "vllm:request_success_total",
            "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total", "vllm:num_requests_swapped", "vllm:cpu_cache_usage_perc",
            "quire:swapped_blocks_total", "quire:preemptions_total"} <= names  # fmt: skip


async def test_secrets_stay_out_of_logs_and_errors(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Neither prompts nor answers should appear in the default log or in an error's text."""
    canary = "canary-5f2a" * 20
    for body in (
        {"prompt": canary},
        {"prompt": canary, "temperature": 9},
        {"prompt": [canary, 5]},
        {"stop": [canary] * 99},
    ):
        _, answer = await site.post(COMPLETIONS, body)
        assert "canary" not in str(answer.get("error"))
    assert "canary" not in caplog.text
    assert TEXT not in caplog.text


async def test_prompts_are_named_for_the_scheduler(make_site: SiteMaker) -> None:
    """The summary should hold the names of each prompt's full blocks, as a worker of that key and salt names them."""
    site = await make_site(worker={"has_prefix_cache": True})
    body: dict[str, Any] = {"prompt": [list(range(1, 41)), [1, 2]], "max_tokens": 1, "cache_salt": "s"}
    async with site.http.post(site.base_url + COMPLETIONS, json=body) as response:
        request_id = RequestId((await response.json())["id"])
    record = await site.bus.load_record(request_id)
    assert record is not None
    names: list[bytes] = []
    maker = PrefixNames(await site.bus.prefix_key(), 16)
    maker.extend(names, maker.root(scope_of(record.summary.tenant, "s")), body["prompt"][0])
    assert len(names) == 2
    assert record.summary.prefixes == (pack(names), b"")
