"""`quire bench table`: everything that README's results table shows, measured in one go on this machine.

The story: make the models if they are not there; for each configuration (model × how weights are stored) start `quire
serve` twice with one set of flags, time the second start, send w1 to w4 through HTTP, and look at the memory; print
markdown tables, and write all figures (JSON) and a plot (SVG). A peer given by `--peer-url` gets each workload right
after ours, from the same client. The prefix cache is off, but for w3 once more in configurations that end in
"-cached": it knows nothing at the start of a round, since each has a prefix of its own.

The machine's limits are measured for each configuration, right before and after its first workload, w1, which memory
bounds: on a virtual machine that rate changes within seconds (37 and 63 GB/s were read within a minute).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench import limits as machine_limits
from quire.bench import machine, processes, report, rows, serve, workloads
from quire.bench.bounds import STORAGES, Bounds
from quire.bench.limits import NO_LIMITS, Limits, LimitsUnknown
from quire.bench.model_cache import ensure_model
from quire.bench.model_shapes import SHAPES
from quire.bench.progress import say
from quire.bench.serve import BenchConfig
from quire.bench.served import BlockWatch, ServedModel
from shared import config, flags
from shared.config import ServeConfig
from shared.errors import ConfigError, QuireError, shorten
from shared.flags import setting

MEMORY_DEFINITION = (
    "resident memory of all processes (launcher, services, Redis; shared pages once: PSS), the most after any "
    "workload, minus the weights of the linear layers as stored, minus the KV blocks in use at their peak"
)


ALL_WORKLOADS = ("w1", "w2", "w3", "w4")
LARGEST_CACHE_BYTES = 128 << 20

HIGHEST_TOKEN_IDS = {"q05b": workloads.HIGHEST_TOKEN_ID, "tiny": workloads.HIGHEST_TOKEN_ID_TINY, "test": 500}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What one `quire serve` of the run is started with, and which workloads it gets at most."""

    shape: str
    storage: str
    has_prefix_cache: bool = False
    workloads: tuple[str, ...] = ALL_WORKLOADS

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.storage}" + ("-cached" if self.has_prefix_cache else "")

    @property
    def flags(self) -> tuple[str, ...]:
        quantized = () if self.storage == "bf16" else (f"--quantization={self.storage}",)
        return quantized if self.has_prefix_cache else (*quantized, "--no-enable-prefix-caching")

    @property
    def highest_token_id(self) -> int:
        return HIGHEST_TOKEN_IDS[self.shape]


CONFIGURATIONS = {
    c.name: c
    for c in (
        Configuration(shape="q05b", storage="bf16"),
        Configuration(shape="q05b", storage="int8"),
        Configuration(shape="q05b", storage="int4"),
        Configuration(shape="q05b", storage="bf16", has_prefix_cache=True, workloads=("w3",)),
        Configuration(shape="q05b", storage="int8", has_prefix_cache=True, workloads=("w3",)),
        Configuration(shape="tiny", storage="bf16"),
        Configuration(shape="test", storage="bf16"),
    )
}
DEFAULT_CONFIGURATIONS = (
    "q05b-bf16", "q05b-int8", "q05b-int4", "q05b-bf16-cached", "q05b-int8-cached", "tiny-bf16",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    configuration: tuple[str, ...] = setting(DEFAULT_CONFIGURATIONS, "models and storages to measure: "
                                             + ", ".join(CONFIGURATIONS))  # fmt: skip
    workload: tuple[str, ...] = setting(ALL_WORKLOADS, "what to send")
    repeats: int = setting(3, "how often each; medians are shown", minimum=1)
    serve_flags: str = setting("", "more flags for `quire serve`, the same for everything, in one argument")
    threads: int | None = setting(None, "threads that the limits are measured with; default: all cores", minimum=1)
    peer_url: str = setting("", "an OpenAI-style server to measure beside ours, without /v1")
    peer_model: str = setting("", "model to ask the peer for; default: the first one that it lists")
    peer_api_key: str = setting("", "bearer token to send to the peer")
    peer_as: str = setting("q05b-bf16", "beside which of our configurations", choices=tuple(CONFIGURATIONS))
    peer_pid: int | None = setting(None, "the peer's first process, or its work is taken for a disturbance", minimum=1)
    out: str = setting("benchmarks/results", "folder for the JSON and the plot")
    cache_dir: str = setting("", "folder of the models; default: ~/.cache/quire")
    quick: bool = setting(False, "one repeat of w1 on a test model: does it all work? No figures to quote")


def main(argv: list[str]) -> int:
    """Run the command; 1 if any request failed or a configuration could not be measured."""
    settings = config.load(TableConfig, argv, program="quire bench table", description=__doc__ or "")
    _check(settings)
    if settings.quick:
        settings, chosen = _quick(settings), [CONFIGURATIONS["test-bf16"]]
    else:
        chosen = [CONFIGURATIONS[name] for name in settings.configuration]
    results = {c.name: _measure_or_tell(c, settings) for c in chosen}
    bounds = {
        c.name: _bounds(c, Limits(**results[c.name]["limits"])) for c in chosen if _has_bounds(c, results[c.name])
    }
    document = _document(settings, bounds, results)
    _show(document, rows.evaluate(rows.rows_for(machine.kind()), results, bounds), bounds, settings.out)
    return 1 if any(map(_has_failed, results.values())) else 0


def _quick(settings: TableConfig) -> TableConfig:
    return TableConfig(**asdict(settings) | {"workload": ("w1",), "repeats": 1})


def _check(settings: TableConfig) -> None:
    """Raise `ConfigError` for what would otherwise fail late."""
    for name in settings.configuration:
        if name not in CONFIGURATIONS:
            raise ConfigError(f"--configuration={shorten(name)}: choose from {', '.join(CONFIGURATIONS)}")
    for name in settings.workload:
        if name not in ALL_WORKLOADS:
            raise ConfigError(f"--workload={shorten(name)}: choose from {', '.join(ALL_WORKLOADS)}")
    if settings.peer_url:
        serve.check_url("--peer-url", settings.peer_url)
    _serve_config(settings)
    report.make_folder("--out", settings.out)


def _serve_config(settings: TableConfig) -> ServeConfig:
    """What `quire serve` makes of the flags given for it. Raises `ConfigError`."""
    return flags.parse(ServeConfig, flags.split("--serve-flags", settings.serve_flags), {}, program="quire serve")


def _measure_limits(settings: TableConfig, known: Limits | None = None) -> Limits | None:
    """What the machine can do at most, as far as `known` and a look at it now show; None where nothing is known."""
    say("measuring the machine's limits (seconds)")
    before = processes.usage([])
    try:
        effort = machine_limits.QUICK if settings.quick else machine_limits.Effort()
        now = machine_limits.measure(effort, settings.threads)
    except LimitsUnknown as error:
        say(f"no limits, so no bounds: {error}")
        return known
    say(machine_limits.describe(now))
    _others_cores(before, [], "the limits")
    return now if known is None else machine_limits.better(known, now)


def _has_bounds(configuration: Configuration, result: dict[str, Any]) -> bool:
    """Whether limits are known and hold: weights that fit into caches are read faster than was measured."""
    return result.get("limits") is not None and _bounds(configuration, NO_LIMITS).weight_bytes > LARGEST_CACHE_BYTES


def _bounds(configuration: Configuration, known: Limits) -> Bounds:
    return Bounds(SHAPES[configuration.shape], STORAGES[configuration.storage], known)


def _measure_or_tell(configuration: Configuration, settings: TableConfig) -> dict[str, Any]:
    """The result, or why there is none: it is `left_out` when no workload is for it, else has `failed`."""
    names = [name for name in settings.workload if name in configuration.workloads]
    if not names:
        result = {"left_out": f"{', '.join(configuration.workloads)} only"}
    else:
        try:
            return _measure(configuration, settings, names)
        except QuireError as error:
            result = {"failed": str(error)}
    say(f"{configuration.name}: no figures: {result}")
    return result


def _has_failed(result: dict[str, Any]) -> bool:
    return "failed" in result or any(found["errors"] for found in result.get("workloads", {}).values())


def _measure(configuration: Configuration, settings: TableConfig, names: list[str]) -> dict[str, Any]:
    """Everything about one configuration.

    Args:
        names: of the workloads to send.
    """
    model = ensure_model(configuration.shape, settings.cache_dir)
    serve_flags = (*flags.split("--serve-flags", settings.serve_flags), *configuration.flags)
    say(f"{configuration.name}: starting `quire serve` twice, the second start is timed")
    with ServedModel(model, serve_flags):
        pass
    with ServedModel(model, serve_flags) as served, BlockWatch(served) as blocks:
        say(f"{configuration.name}: ready after {served.start_s:.2f} s")
        result: dict[str, Any] = {"start_s": served.start_s, "workloads": {}, "peer": {}}
        resident, known = 0, _measure_limits(settings)
        for name in names:
            ours = _our_client(configuration, settings, served.url, name)
            result["workloads"][name] = _send(ours, lambda: served.pids)
            resident = max(resident, processes.resident_bytes(served.pids))
            if name == names[0]:
                known = _measure_limits(settings, known)
            if settings.peer_url and configuration.name == settings.peer_as:
                peer = _peer_client(configuration, settings, name)
                result["peer"][name] = _send(peer, lambda: [*served.pids, *_peer_pids(settings)])
    result["limits"] = None if known is None else asdict(known)
    return result | _memory(configuration, settings, resident, blocks.most)


def _peer_pids(settings: TableConfig) -> list[int]:
    return [] if settings.peer_pid is None else processes.tree(settings.peer_pid)


def _our_client(configuration: Configuration, settings: TableConfig, url: str, workload: str) -> BenchConfig:
    return BenchConfig(
        base_url=url, workload=(workload,), repeats=settings.repeats, highest_token_id=configuration.highest_token_id
    )


def _peer_client(configuration: Configuration, settings: TableConfig, workload: str) -> BenchConfig:
    return BenchConfig(
        base_url=settings.peer_url, workload=(workload,), repeats=settings.repeats, model=settings.peer_model,
        api_key=settings.peer_api_key, highest_token_id=configuration.highest_token_id,
    )  # fmt: skip


def _send(client: BenchConfig, pids: Callable[[], list[int]]) -> dict[str, Any]:
    """One workload's report, and how busy other processes than `pids` kept the machine meanwhile."""
    before = processes.usage(pids())
    (found,) = asyncio.run(serve.measure(client))
    others = _others_cores(before, pids(), found["workload"])
    for error in sorted(set(found["errors"]))[:5]:
        say(f"FAILED: {error}")
    return found | {"others_cores": others}


def _others_cores(before: processes.Usage, pids: list[int], what: str) -> float:
    """How many cores other processes than `pids` have kept busy since `before`; says so when it was too much."""
    others = processes.others_cores(before, processes.usage(pids))
    if others > processes.SPOILED_CORES:
        say(f"SPOILED: other processes kept {others:.2f} cores busy during {what}")
    return others


def _memory(configuration: Configuration, settings: TableConfig, resident: int, num_blocks: int) -> dict[str, float]:
    """The figures behind `MEMORY_DEFINITION`."""
    sizes = _bounds(configuration, NO_LIMITS)
    kv_bytes = num_blocks * _serve_config(settings).engine.block_size * sizes.kv_token_bytes
    return {
        "memory_resident_bytes": resident,
        "memory_weight_bytes": sizes.weight_bytes,
        "memory_kv_bytes": kv_bytes,
        "memory_beyond_bytes": resident - sizes.weight_bytes - kv_bytes,
    }


def _document(settings: TableConfig, bounds: dict[str, Bounds], results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = [Limits(**result["limits"]) for result in results.values() if result.get("limits")]
    return {
        "date": report.today(),
        "machine": machine.describe(),
        "limits": asdict(functools.reduce(machine_limits.better, found)) if found else None,
        "bounds": {name: report.bound_figures(bound) for name, bound in bounds.items()},
        "settings": report.shown(settings),
        "memory_definition": MEMORY_DEFINITION,
        "results": results,
        "rows": [report.as_json(m) for m in rows.evaluate(rows.rows_for(machine.kind()), results, bounds)],
    }


def _show(document: dict[str, Any], measured: list[rows.Measured], bounds: dict[str, Bounds], out: str) -> None:
    """Print the tables, write JSON and plot into the folder `out`."""
    about, settings = document["machine"], document["settings"]
    limits_line = machine_limits.describe(Limits(**document["limits"])) if document["limits"] else "limits unknown"
    title = f"quire {about['commit']}, {document['date']}, {about['cores']} cores of {about['cpu']}"
    print(f"\n{title}; through HTTP, scheduler and Redis; medians of {settings['repeats']}; "
          f"flags: {settings['serve_flags'] or 'defaults'}; {limits_line}.\n")  # fmt: skip
    print(report.results_table(measured))
    if bounds:
        print("\n" + report.bounds_table(bounds))
    print(f"\nMemory: {MEMORY_DEFINITION}.")
    print(f"Cores that other processes kept busy meanwhile: {_describe_others(document['results']) or 'not known'}.")
    for name, result in document["results"].items():
        if reason := result.get("left_out") or result.get("failed"):
            print(f"Not measured: {name}: {reason.splitlines()[0]}")
    drawing = report.draw_table(title, measured)
    for path in report.write(report.make_folder("--out", out), "table", document, drawing):
        print(f"written: {path}")


def _describe_others(results: dict[str, dict[str, Any]]) -> str:
    found = ((name, result.get("workloads", {})) for name, result in results.items())
    return ", ".join(
        f"{name} {workload} {measured['others_cores']:.2f}"
        for name, reports in found
        for workload, measured in reports.items()
    )
