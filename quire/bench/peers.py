"""What other programs gave on the kinds of machine that they were measured on: references, not of the run shown."""

from __future__ import annotations

from dataclasses import dataclass

W1, W1_FIRST, W2 = "w1 time per output token", "w1 time to first token", "w2 output"
W3, W4, W4_FIRST = "w3 wall, no prefix cache", "w4 longest stall of a stream", "w4 long prompt's time to first token"
W3_CACHED = "w3 wall, cold prefix cache"
MEMORY, START = "resident memory beyond weights + KV", "start to ready, second start"
"""Labels of the table's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The program that led a row, in the row's unit."""

    name: str
    figure: float


ZEN4 = "2 cores of an AMD EPYC (Zen 4), 2026-11-30"
ZEN3 = "2 cores of an AMD EPYC (Zen 3), 2026-11-30"
XEON_AMX = "2 cores of an Intel Xeon with AMX, 2026-11-30"

PEERS: dict[str, dict[tuple[str, str], Peer]] = {
    ZEN4: {
        (W1, "q05b-bf16"): Peer(name="vLLM CPU + zentorch, no HTTP", figure=28.5),
        (W1_FIRST, "q05b-bf16"): Peer(name="OpenVINO GenAI, no HTTP", figure=257),
        (W2, "q05b-bf16"): Peer(name="vLLM CPU + zentorch, no HTTP", figure=179),
        (W2, "q05b-int8"): Peer(name="vLLM CPU + zentorch, W8A8, no HTTP", figure=259),
        (W3, "q05b-bf16"): Peer(name="vLLM CPU + zentorch, no HTTP", figure=18.1),
        (W3_CACHED, "q05b-bf16-cached"): Peer(name="vLLM CPU, no HTTP, another day", figure=4.32),
        (W3_CACHED, "q05b-int8-cached"): Peer(name="vLLM CPU, W8A8, no HTTP, another day", figure=2.82),
        (W4, "q05b-bf16"): Peer(name="OpenVINO GenAI, no HTTP", figure=0.65),
        (W4_FIRST, "q05b-bf16"): Peer(name="OpenVINO GenAI, no HTTP", figure=4.96),
        (W1, "q05b-int8"): Peer(name="vLLM CPU + zentorch, W8A8, no HTTP", figure=22.2),
        (W1, "q05b-int4"): Peer(name="llama.cpp server Q4_0", figure=14.5),
        (W1, "tiny-bf16"): Peer(name="llama.cpp server", figure=0.41),
        (W2, "tiny-bf16"): Peer(name="llama.cpp server", figure=2271),
        (MEMORY, "q05b-bf16"): Peer(name="llama.cpp server", figure=0.3),
        (START, "q05b-bf16"): Peer(name="OpenVINO GenAI", figure=1.0),
    },
    XEON_AMX: {
        (W1, "q05b-bf16"): Peer(name="OpenVINO GenAI, no HTTP", figure=49.3),
        (W1_FIRST, "q05b-bf16"): Peer(name="vLLM CPU, no HTTP", figure=116),
        (W2, "q05b-bf16"): Peer(name="vLLM CPU, no HTTP", figure=223),
        (W2, "q05b-int8"): Peer(name="vLLM CPU, W8A8, no HTTP", figure=284),
        (W3_CACHED, "q05b-bf16-cached"): Peer(name="vLLM CPU, no HTTP", figure=2.98),
        (W4, "q05b-bf16"): Peer(name="OpenVINO GenAI, no HTTP", figure=0.33),
        (W4_FIRST, "q05b-bf16"): Peer(name="OpenVINO GenAI, no HTTP", figure=2.43),
        (W1, "q05b-int8"): Peer(name="vLLM CPU, W8A8, no HTTP", figure=41.1),
        (W1, "tiny-bf16"): Peer(name="llama.cpp server", figure=0.91),
        (W2, "tiny-bf16"): Peer(name="llama.cpp server", figure=1220),
        (START, "q05b-bf16"): Peer(name="OpenVINO GenAI", figure=1.8),
    },
}
"""By kind of machine, label and configuration."""


def kind_of(cpuinfo: str) -> str | None:
    """The kind of machine that this content of /proc/cpuinfo is of; None: nothing was measured on such a one."""
    words = set(cpuinfo.split())
    if "AuthenticAMD" in words and "avx512_bf16" in words:
        return ZEN4
    if "AuthenticAMD" in words and "vaes" in words and "avx512f" not in words:
        return ZEN3
    if "GenuineIntel" in words and "amx_bf16" in words:
        return XEON_AMX
    return None
