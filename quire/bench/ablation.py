"""`quire bench ablation`: what each mechanism is worth on this machine, by turning it off.

For each mechanism (`mechanisms.py`) `quire serve` is started twice on the same model, without it and with it, and gets
the same seeded traffic through HTTP; the table shows both sides and their ratio beside what was aimed at. What is
compared runs one after the other on the same cores, so only the ratio means anything.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_worker.model.families import read_config
from quire import checkpoint
from quire.bench import machine, report, serve
from quire.bench.mechanisms import MECHANISMS, Figure, Mechanism, ratio_of
from quire.bench.progress import say
from quire.bench.serve import BenchConfig
from quire.bench.served import ServedModel, SlotWatch
from quire.bench.svg import Bars, render
from shared import config, flags
from shared.errors import ConfigError, shorten
from shared.flags import setting
from shared.paths import cache_folder
from shared.work_time import cost_of

COST_HEAD = ("a million tokens, off", "on")
HEAD = ("mechanism", "figure", "off", "on", "on / off", "published", "aim", "reached")
HIGHEST_TOKEN_ID = 40_000
KV_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationConfig:
    model: str = setting("", "folder of a checkpoint; none: SmolLM2-135M-Instruct", is_positional=True)
    mechanism: tuple[str, ...] = setting(tuple(MECHANISMS), "what to turn off in turn: " + ", ".join(MECHANISMS))
    repeats: int = setting(1, "how often each traffic is sent; medians are shown", minimum=1)
    serve_flags: str = setting("", "more flags for `quire serve`, the same for everything, in one argument")
    highest_token_id: int = setting(HIGHEST_TOKEN_ID, "token ids of prompts are drawn up to this", minimum=400)
    json: str = setting("", "write all figures to this file")
    price_per_hour: float = setting(0.0, "what a worker costs an hour, in any money: adds what a million output tokens "
                                    "cost, with the workers paid for the whole time; 0: not known", minimum=0,
                                    maximum=1e9)  # fmt: skip
    plot: str = setting("", "write the ratios as SVG into this folder")
    cache_dir: str = setting("", "folder of the default model; default: ~/.cache/quire")


def main(argv: list[str]) -> int:
    """Run the command; 1 if a request failed."""
    settings = config.load(AblationConfig, argv, program="quire bench ablation", description=__doc__ or "")
    chosen = [_find(name) for name in settings.mechanism]
    more = tuple(flags.split("--serve-flags", settings.serve_flags))
    num_workers = flags.parse(config.ServeConfig, list(more), {}, program="quire serve").workers
    json_file = _writable("--json", settings.json)
    plots = report.make_folder("--plot", settings.plot) if settings.plot else None
    model = checkpoint.resolve(settings.model, cache_folder(settings.cache_dir), say)
    results = {m.name: _measure(m, model, more, settings) for m in chosen}
    price = settings.price_per_hour * num_workers
    _add_costs(results, price)
    document = _document(settings, results)
    about = document["machine"]
    title = f"quire {about['commit']}, {document['date']}, {about['cores']} cores of {about['cpu']}, {model.name}"
    print(f"\n{title}; medians of {settings.repeats}.\n\n{_table(chosen, results, has_cost=price > 0)}")
    if json_file is not None:
        json_file.write_text(report.to_text(document), encoding="utf-8")
        print(f"\nwritten: {json_file}")
    if plots is not None:
        path = plots / f"ablation-{document['date']}-{about['commit'] or 'unknown'}.svg"
        path.write_text(_draw(title, chosen, results), encoding="utf-8")
        print(f"written: {path}")
    return 1 if any(side["errors"] for result in results.values() for side in result.values()) else 0


def _find(name: str) -> Mechanism:
    if name not in MECHANISMS:
        raise ConfigError(f"--mechanism={shorten(name)}: choose from {', '.join(MECHANISMS)}")
    return MECHANISMS[name]


def _writable(flag: str, given: str) -> Path | None:
    if not given:
        return None
    path = Path(given)
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}={shorten(given)}: there is no folder {shorten(path.parent)}")
    return path


def _measure(mechanism: Mechanism, model: Path, more: tuple[str, ...], settings: AblationConfig) -> dict[str, Any]:
    """What was measured without the mechanism (`off`) and with it (`on`)."""
    say(f"{mechanism.name}: {mechanism.what}")
    return {
        side: _measure_side(mechanism, model, (*more, *own, *_cache_flags(mechanism, model)), settings, side)
        for side, own in (("off", mechanism.off), ("on", mechanism.on))
    }


def _cache_flags(mechanism: Mechanism, model: Path) -> tuple[str, ...]:
    """The size of the KV cache that both sides have; none where it does not matter."""
    if not mechanism.num_kv_tokens:
        return ()
    shape = read_config(model)
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * KV_BYTES
    return (f"--kv-cache-memory-bytes={mechanism.num_kv_tokens * token_bytes}", "--kv-cache-dtype=bf16")


def _measure_side(
    mechanism: Mechanism, model: Path, serve_flags: tuple[str, ...], settings: AblationConfig, side: str
) -> dict[str, Any]:
    """Medians by name, `kv_tokens`, and the peaks of `ServedModel`; `errors` of requests."""
    with ServedModel(model, serve_flags) as served:
        measured: dict[str, Any] = {"errors": [], "kv_tokens": served.num_kv_tokens()}
        if mechanism.workload:
            say(f"{mechanism.name}, {side}: sending")
            client = BenchConfig(
                base_url=served.url, workload=(mechanism.workload,), repeats=settings.repeats,
                highest_token_id=settings.highest_token_id, concurrency=mechanism.concurrency,
            )  # fmt: skip
            with SlotWatch(served) as slots:
                (found,) = asyncio.run(serve.measure(client))
            measured |= found["median"] | {"errors": found["errors"]} | served.peaks() | slots.shares()
    for error in sorted(set(measured["errors"]))[:5]:
        say(f"FAILED: {error}")
    return measured


def _ratio(figure: Figure, result: dict[str, Any]) -> float:
    return ratio_of(float(result["off"][figure.key]), float(result["on"][figure.key]))


def _add_costs(results: dict[str, Any], price_per_hour: float) -> None:
    """What a million output tokens cost, where it is known how many a second there are; of all workers together."""
    for side in (side for result in results.values() for side in result.values()):
        if price_per_hour and side.get("output_tokens_per_s"):
            side["cost_per_million_tokens"] = cost_of(1e6 / side["output_tokens_per_s"], price_per_hour)


def _table(chosen: list[Mechanism], results: dict[str, Any], *, has_cost: bool = False) -> str:
    head = HEAD + COST_HEAD if has_cost else HEAD
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for mechanism in chosen:
        for figure in mechanism.figures:
            ratio = _ratio(figure, results[mechanism.name])
            off, on = (results[mechanism.name][side][figure.key] for side in ("off", "on"))
            aim = figure.aim
            wanted = "–" if aim is None else str(aim)
            reached = "–" if aim is None else "yes" if aim.is_met(off, on) else "no"
            cells = [f"{off:,.4g} {figure.unit}", f"{on:,.4g} {figure.unit}", f"{ratio:.3f}"]
            costs = [_cost(results[mechanism.name][side]) for side in ("off", "on")] if has_cost else []
            lines.append(" | ".join([mechanism.name, figure.label, *cells, figure.published, wanted, reached, *costs]))
    return "\n".join(f"| {line} |" for line in lines)


def _cost(side: dict[str, Any]) -> str:
    cost = side.get("cost_per_million_tokens")
    return "–" if cost is None else f"{cost:,.4g}"


def _draw(title: str, chosen: list[Mechanism], results: dict[str, Any]) -> str:
    bars = {f"{m.name}: {f.label}": _ratio(f, results[m.name]) for m in chosen for f in m.figures}
    return render(title, [Bars(title="on / off (1: no difference)", bars=bars, mark=1.0)])


def _document(settings: AblationConfig, results: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": report.today(),
        "machine": machine.describe(),
        "settings": report.shown(settings),
        "results": results,
        "flags": {name: {"off": MECHANISMS[name].off, "on": MECHANISMS[name].on} for name in results},
    }
