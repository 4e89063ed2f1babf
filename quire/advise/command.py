"""`quire advise`: reads a running system's own metrics and says what to set, why, and what it should gain.

It looks at /metrics twice, --seconds apart, so run it under the load that matters; with --seconds 0 it looks once, at
all that was since the start. It changes nothing. What it says was seen is of your system; gains are said to be
measured, and where, or expected. The rules are in docs/tuning.md, and come in the order in which to try them.
"""

from __future__ import annotations

import http.client
import json
import shlex
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.advise.advice import Advice
from quire.advise.rules import advise, open_questions
from quire.advise.snapshot import NoWorkers, Samples, Snapshot, WorkerSettings, make_snapshot, read_samples
from quire.bench.serve import check_url, read_url
from shared import config
from shared.errors import ConfigError, QuireError, shorten
from shared.flags import setting

TIMEOUT_S = 10.0
MAX_BYTES = 8 * 2**20
REPORT_LAG_S = 3.0
"""An idle worker reports once a second, and a gateway reads reports about as often."""
RETRY_S = 0.25


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        """None: what points elsewhere is an error."""


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseConfig:
    base_url: str = setting("http://127.0.0.1:8000", "address of a gateway, without /v1")
    metrics_url: tuple[str, ...] = setting((), "address(es) of gateways' metrics, where there are several: the first "
                                           "one shows the cell; default: /metrics of --base-url")  # fmt: skip
    seconds: float = setting(10.0, "time between two looks; 0: one look, at all since the start", minimum=0,
                             maximum=3600)  # fmt: skip
    ttft_target_ms: float = setting(500.0, "first tokens ought to come within this", minimum=0.001)
    tpot_target_ms: float = setting(50.0, "further tokens ought to come within this", minimum=0.001)
    api_key: str = setting("", "bearer token to send")
    json: bool = setting(False, "print JSON")


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ConfigError: a setting is wrong.
        QuireError: the metrics cannot be had, or are not Quire's.
    """
    settings = config.load(AdviseConfig, argv, program="quire advise", description=__doc__ or "")
    urls = _metrics_urls(settings)
    snapshot = replace(
        look(urls, settings.seconds, settings.api_key),
        max_ttft_s=settings.ttft_target_ms / 1e3,
        max_tpot_s=settings.tpot_target_ms / 1e3,
    )
    found = advise(snapshot)
    if settings.json:
        print(json.dumps(_document(urls[0], snapshot, found), indent=2))
    else:
        print(format_advice(urls[0], snapshot, found))
    return 0


def _metrics_urls(settings: AdviseConfig) -> tuple[str, ...]:
    """Each once. Raises `ConfigError`, also for a key that cannot be sent."""
    check_url("--base-url", settings.base_url)
    for url in (settings.base_url, *settings.metrics_url):
        if read_url(url) is None or "@" in url:
            raise ConfigError(f"--metrics-url={shorten(url)!r}: must be like http://127.0.0.1:8000/metrics")
    if not (settings.api_key.isascii() and settings.api_key.isprintable()):
        raise ConfigError("--api-key: has characters that cannot be sent")
    return tuple(dict.fromkeys(settings.metrics_url)) or (settings.base_url.rstrip("/") + "/metrics",)


def look(urls: tuple[str, ...], seconds: float, api_key: str) -> Snapshot:
    """What the metrics at `urls` say in the next `seconds`. Raises `QuireError`."""
    first, workers = _first_scrape(urls, api_key)
    if not seconds:
        return make_snapshot(None, first, workers, seconds=0.0)
    since = time.monotonic()
    time.sleep(seconds)
    last, workers = _scrape(urls, api_key)
    return make_snapshot(first, last, workers, seconds=time.monotonic() - since)


def format_advice(url: str, s: Snapshot, found: list[Advice]) -> str:
    """What is printed."""
    over = f"{s.seconds:.0f} s" if s.seconds else "since the start"
    lines = [
        f"{shorten(url)}, {over}: {s.num_workers} workers, {s.num_running:.0f} running, {s.num_waiting:.0f} waiting, "
        f"{s.usage:.0%} of KV blocks in use; {s.num_ended:.0f} requests ended, first token {s.ttft_s * 1e3:.0f} ms, "
        f"each further one {s.tpot_s * 1e3:.1f} ms"
    ]
    for number, advice in enumerate(found, 1):
        lines += ["", f"{number}. {advice.title}  [{advice.rule}]"]
        lines += [f"   set   {shlex.quote(flag)}" for flag in advice.flags]
        lines += [f"   seen  {advice.seen}", f"   gain  {advice.gain}"]
    if not found:
        lines += ["", "Nothing to change: no rule of docs/tuning.md finds anything in what was measured."]
    notes = open_questions(s)
    return "\n".join([*lines, *([""] if notes else []), *(f"Not judged: {note}" for note in notes)])


def _document(url: str, snapshot: Snapshot, found: list[Advice]) -> dict[str, Any]:
    return {
        "source": url,
        "snapshot": asdict(snapshot),
        "advice": [asdict(advice) | {"group": advice.group.name.lower()} for advice in found],
        "not_judged": open_questions(snapshot),
    }


def _first_scrape(urls: tuple[str, ...], api_key: str) -> tuple[Samples, WorkerSettings]:
    """As `_scrape`; a gateway that has just started is given the time in which it hears of workers."""
    until = time.monotonic() + REPORT_LAG_S
    while True:
        try:
            return _scrape(urls, api_key)
        except NoWorkers:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_S)


def _scrape(urls: tuple[str, ...], api_key: str) -> tuple[Samples, WorkerSettings]:
    """The cell by the first of `urls`; what the processes behind the others counted is added."""
    samples, workers = read_samples(_fetch(urls[0], api_key), shorten(urls[0]))
    for url in urls[1:]:
        other, _ = read_samples(_fetch(url, api_key), shorten(url))
        own = {name: value for name, value in other.items() if name.startswith(_OF_A_PROCESS)}
        samples = {**samples, **{name: samples.get(name, 0.0) + value for name, value in own.items()}}
    return samples, workers


_OF_A_PROCESS = (
    "vllm:time_to_first_token", "vllm:time_per_output_token", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
)  # fmt: skip
"""What each gateway counts for itself; all else that the rules read is the cell's, and the same at each."""


def _fetch(url: str, api_key: str) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with _opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as response:
            return _read_all(response).decode()
    except urllib.error.HTTPError as error:
        remedy = _REMEDIES.get(error.code, "")
        raise QuireError(f"{shorten(url)} answers {error.code} {_shown(error.reason)}{remedy}") from None
    except UnicodeDecodeError:
        raise QuireError(f"{shorten(url)} is not in Prometheus' text format; give the address of a gateway") from None
    except (OSError, ValueError) as error:
        raise QuireError(f"{shorten(url)} cannot be read: {_shown(getattr(error, 'reason', error))}") from None
    except http.client.HTTPException:
        raise QuireError(f"{shorten(url)} does not speak HTTP; give the address of a gateway") from None


_REMEDIES = {
    401: "; give --api-key",
    403: "; give --api-key",
    **dict.fromkeys((301, 302, 303, 307, 308), "; give the address that it points to"),
}


def _read_all(response: http.client.HTTPResponse) -> bytes:
    """The body. Raises `OSError` when it is too long, or has not ended after `TIMEOUT_S`."""
    until, data = time.monotonic() + TIMEOUT_S, bytearray()
    while part := response.read1(2**16):
        data += part
        if len(data) > MAX_BYTES:
            raise OSError(f"it has more than {MAX_BYTES // 2**20} MiB")
        if time.monotonic() > until:
            raise TimeoutError(f"it has not ended after {TIMEOUT_S:g} s")
    return bytes(data)


def _shown(text: object) -> str:
    """What a server says, fit for one line."""
    return shorten("".join(c if c.isprintable() else "?" for c in str(text)))
