"""Identify the session of a request and assign it to an arm. Pure functions with the same result on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any


def session_key(headers: Mapping[str, str], body: Mapping[str, Any] | None, header: str, client: str) -> str:
    """Return the key of the session that a request belongs to.

    The first available source wins: the session header, the ``user`` field of the body, the token, the client address.

    Args:
        headers: Headers by lower-case name.
        body: JSON body of the request, if it has one.
        header: Name of the session header.
        client: Address of the client.
    """
    if session := headers.get(header.lower()):
        return f"session {session}"
    if body and isinstance(user := body.get("user"), str) and user:
        return f"user {user}"
    if token := headers.get("authorization") or headers.get("api-key"):
        return f"token {token}"
    return f"client {client}"


def goes_to_candidate(key: str, salt: str, share: float) -> bool:
    """Return whether a session key is assigned to the candidate.

    The assignment is sticky: the same key always gets the same arm. A larger share only adds keys to the candidate and
    never removes one.

    Args:
        key: Key of the session.
        salt: Version of the candidate, so that each candidate gets different users.
        share: Share of the keys that are assigned to the candidate, from 0 to 1.
    """
    return int.from_bytes(_hash(key, salt), "big") / 2**64 < share


def session_of(key: str, salt: str) -> str:
    """Return the recorded form of a session key: a hash that only shows which requests belong together."""
    return hashlib.blake2b(f"kept:{salt}:{key}".encode(), digest_size=12).hexdigest()


def _hash(key: str, salt: str) -> bytes:
    return hashlib.blake2b(f"{salt}:{key}".encode(), digest_size=8).digest()
