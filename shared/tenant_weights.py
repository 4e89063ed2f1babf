"""`--tenant-weights`: how large each tenant's share of a busy cell is beside the others'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.errors import ConfigError, shorten

FLAG = "--tenant-weights"
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""A range in which a counter of tokens over a weight stays an exact enough float for years."""


def parse_tenant_weights(items: Iterable[str]) -> Mapping[str, float]:
    """Weight by tenant, from `tenant=weight` each; who is not named has weight 1.

    Raises:
        ConfigError: no such pair, a weight out of range, or a tenant twice.
    """
    weights: dict[str, float] = {}
    for item in items:
        tenant, _, text = item.rpartition("=")
        weight = _weight(item, text)
        if not tenant:
            raise _refuse(item, "say TENANT=WEIGHT, as in anyone=2")
        if tenant in weights:
            raise _refuse(item, "this tenant has a weight already")
        weights[tenant] = weight
    return weights


def _weight(item: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise _refuse(item, "say TENANT=WEIGHT, as in anyone=2") from None
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise _refuse(item, f"the weight must be {MIN_WEIGHT} to {MAX_WEIGHT}")
    return weight


def _refuse(item: str, why: str) -> ConfigError:
    return ConfigError(f"{FLAG}: {shorten(item)}: {why}")
