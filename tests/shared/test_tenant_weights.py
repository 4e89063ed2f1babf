"""`--tenant-weights`, read strictly."""

from __future__ import annotations

import pytest

from shared.config import SchedulerConfig, load
from shared.errors import ConfigError
from shared.tenant_weights import parse_tenant_weights


def test_each_tenant_gets_its_weight() -> None:
    """Pairs should become numbers; a name may hold an equals sign."""
    assert parse_tenant_weights(("a=2", "b=c=0.5")) == {"a": 2.0, "b=c": 0.5}


@pytest.mark.parametrize("item", ["a", "=2", "a=", "a=x", "a=0", "a=-1", "a=nan", "a=inf", "a=1000"])
def test_what_is_no_weight_is_refused_at_the_start(item: str) -> None:
    """A scheduler should not start with it, and the error name flag and value."""
    with pytest.raises(ConfigError, match="--tenant-weights: " + item):
        load(SchedulerConfig, ["--tenant-weights", item], program="test")


def test_a_tenant_has_one_weight() -> None:
    """Two weights for one tenant should be refused."""
    with pytest.raises(ConfigError, match="a=3: this tenant has a weight already"):
        parse_tenant_weights(("a=2", "a=3"))
