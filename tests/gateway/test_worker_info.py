"""How workers are set, as labels in /metrics."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from gateway.worker_info import MAX_SETS, WorkerInfoCollector
from shared.ids import WorkerId
from tests.gateway.conftest import Site, SiteMaker

SETTINGS = (("kv_cache_dtype", "int8"), ("max_num_batched_tokens", "512"), ("tensor_parallel_size", "2"))


async def read_labels(site: Site, name: str) -> list[dict[str, str]]:
    async with site.http.get(f"{site.base_url}/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    return [sample.labels for family in families for sample in family.samples if sample.name == name]


async def test_says_how_workers_are_set(make_site: SiteMaker) -> None:
    """What a worker's hello says should be there as labels; what an older worker does not say should be empty."""
    site = await make_site(worker={"settings": SETTINGS, "has_prefix_cache": True, "device": "cuda:1"})
    (cache,) = await read_labels(site, "vllm:cache_config_info")
    assert cache == {
        "block_size": "16", "num_gpu_blocks": "64", "num_cpu_blocks": "0", "cache_dtype": "int8",
        "gpu_memory_utilization": "", "enable_prefix_caching": "True", "kv_layout": "", "sliding_window": "0",
        "preemption_mode": "auto",
    }  # fmt: skip
    (engine,) = await read_labels(site, "quire:engine_config_info")
    assert (engine["device"], engine["max_num_seqs"], engine["max_num_batched_tokens"]) == ("cuda", "8", "512")
    assert (engine["tensor_parallel_size"], engine["batching"]) == ("2", "")


async def test_workers_that_are_alike_share_a_series(site: Site) -> None:
    """The number of series should follow the ways in which workers are set, not the workers, and be bounded."""
    hello = site.worker.hello
    alike = [replace(hello, worker_id=WorkerId(f"w{i}:1")) for i in range(5)]
    other = [replace(hello, block_size=8)]
    cache, _ = WorkerInfoCollector([*alike, *other]).collect()
    assert sorted(sample.labels["block_size"] for sample in cache.samples) == ["16", "8"]
    cache, _ = WorkerInfoCollector([replace(hello, block_size=i + 1) for i in range(40)]).collect()
    assert len(cache.samples) == MAX_SETS
