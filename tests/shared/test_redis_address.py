"""What `--redis-url` may say."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from shared.redis_address import RedisAddress, parse_address


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://127.0.0.1", RedisAddress(host="127.0.0.1")),
        ("redis://:p%40ss@10.0.0.1:6380/2", RedisAddress(host="10.0.0.1", port=6380, password="p@ss", database=2)),
        ("redis://me:pass@redis:6379/0", RedisAddress(host="redis", username="me", password="pass")),
        ("redis://[::1]:7000", RedisAddress(host="::1", port=7000)),
        ("rediss://host?ssl_ca_certs=/ca.pem", RedisAddress(host="host", has_tls=True, ca_file="/ca.pem")),
        ("unix:///run/r.sock", RedisAddress(path="/run/r.sock")),
        ("unix:///run/a%20b.sock?db=3", RedisAddress(path="/run/a b.sock", database=3)),
    ],
)
def test_addresses(url: str, expected: RedisAddress) -> None:
    """Each form should be read as it is meant."""
    assert parse_address(url) == expected


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:6379", "http://host", "redis://", "unix://", "redis://host:port", "redis://host:99999",
     "redis://host/first", "redis://host?dbb=1", "redis://host?db"],
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    """Anything else should be refused before a connection is tried, with the forms that there are."""
    with pytest.raises(ConfigError, match="unix:///path"):
        parse_address(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", []),
        ("redis://:secret@host/4", [("AUTH", "secret"), ("SELECT", "4")]),
        ("redis://me:secret@host", [("AUTH", "me", "secret")]),
    ],
)
def test_the_greeting(url: str, expected: list[tuple[str, ...]]) -> None:
    """A connection should enter with the password and select its database, and say nothing needless."""
    assert parse_address(url).greeting() == expected
