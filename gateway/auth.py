"""API keys: who a request comes from, decided without telling anything by time.

Keys and what clients send are compared as SHA-256 digests, in constant time, against every known key: an unknown key
costs what a known one does. A tenant is the digest of its key; without keys there is one tenant.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from shared.errors import Unauthorized
from shared.limits import ANYONE, TENANT_NAME_CHARS

OPEN_ROUTES = frozenset({"/health", "/ready", "/version"})
"""Routed paths that need no key, for probes; everything else does, `/metrics` and unknown paths too."""
ADMIN_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Those that need the admin key instead."""


class KeyRing:
    """The keys that clients may use; none: everybody may do everything."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in api_keys]

    @property
    def tenants(self) -> frozenset[str]:
        """Names of all tenants there may be."""
        return frozenset(digest.hex()[:TENANT_NAME_CHARS] for digest in self._digests) or frozenset({ANYONE})

    def tenant(self, headers: Sequence[str]) -> str:
        """The tenant of a request.

        Args:
            headers: all its `Authorization` headers.

        Raises:
            Unauthorized: there are keys, and it does not carry exactly one header with one of them.
        """
        if not self._digests:
            return ANYONE
        if len(headers) != 1:
            raise Unauthorized("send one header: Authorization: Bearer <key>")
        scheme, _, key = headers[0].partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not (scheme.lower() == "bearer" and any(matches)):
            raise Unauthorized("the API key is not valid")
        return digest.hex()[:TENANT_NAME_CHARS]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
