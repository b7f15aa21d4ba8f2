"""Who answers whom: what a user is known by, and on which arm that is. Pure, and the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any


def session_key(headers: Mapping[str, str], body: Mapping[str, Any] | None, header: str, client: str) -> str:
    """What a request belongs to: its session's header, else the ``user`` of its body, else its token, else its address.

    Args:
        headers: By lower-case name.
        body: Of a request in JSON.
        header: That names a session.
        client: Address that it came from.
    """
    if session := headers.get(header.lower()):
        return f"session {session}"
    if body and isinstance(user := body.get("user"), str) and user:
        return f"user {user}"
    if token := headers.get("authorization") or headers.get("api-key"):
        return f"token {token}"
    return f"client {client}"


def goes_to_candidate(key: str, salt: str, share: float) -> bool:
    """Sticky: the same key goes the same way. A larger share only adds keys, it never takes one back.

    Args:
        salt: The candidate's version: each candidate has other users.
    """
    return int.from_bytes(_hash(key, salt), "big") / 2**64 < share


def session_of(key: str, salt: str) -> str:
    """What is kept of a key: a hash, so that requests of one session are known to be, and nothing else."""
    return hashlib.blake2b(f"kept:{salt}:{key}".encode(), digest_size=12).hexdigest()


def _hash(key: str, salt: str) -> bytes:
    return hashlib.blake2b(f"{salt}:{key}".encode(), digest_size=8).digest()
