"""Mutate honest bytes into hostile ones, repeatably by seed: single bytes, structure, or known bad words."""

from __future__ import annotations

import json
from random import Random
from typing import Any

# Inputs that have broken parsers, in this project and elsewhere.
WORDS = (
    *(b'"\\ud800"', b"\xed\xa0\x80", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\x1b[2J", b"\\", b'"', b"'", b"\n---\n"),
    *(b"9" * 400, b"9" * 5000, b"-1", b"1e999", b"NaN", b"Infinity", b".nan", b".inf", b"1:59:59", b"0x" + b"f" * 99),
    *(b"[" * 2000, b"{" * 2000, b'{"a":' * 500, b"- " * 500, b"&a ", b"*a", b"<<: *a", b"? ", b"!!binary ", b"!!set "),
    *(b"2024-13-45", b"2024-01-02", b"!!int ''", b"!!python/name:os.system ", b"null", b"true", b"{}", b"[]", b": "),
    *(b"../../x", b"/dev/zero", b"/etc/passwd", b"~nobody/x", b"x" * 5000, b"(" * 1000, b"(t", b"}", b")\x85"),
    b"PK\x05\x06",
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), 1e300),
    *("", "x", "a\0b", "\ud800", "../x", "/dev/zero", "x" * 300, "1", "linear", "~nobody/x"),
    *([], {}, [[]], [None], {"a": {}}, ["a", "a"], [1, "a", None]),
)


def mutated(seed: bytes, others: tuple[bytes, ...], random: Random) -> bytes:
    """Return `seed` with one to four changes, which may insert parts of ``others``."""
    value = seed
    if random.random() < 0.5 and (structured := _structured(seed, random)) is not None:
        value = structured
        if random.random() < 0.5:
            return value
    for _ in range(random.randint(1, 4)):
        value = _byte_change(value, others, random)
    return value


def _byte_change(value: bytes, others: tuple[bytes, ...], random: Random) -> bytes:
    at = random.randint(0, len(value))
    to = min(len(value), at + int(random.expovariate(0.1)))
    kind = random.randrange(8)
    if kind == 0 and value:
        at = min(at, len(value) - 1)
        return value[:at] + bytes((value[at] ^ (1 << random.randrange(8)),)) + value[at + 1 :]
    if kind == 1:
        return value[:at] + random.randbytes(random.randint(1, 4)) + value[at:]
    if kind == 2:
        return value[:at] + value[to:]
    if kind == 3:
        return value[:to] + value[at:to] * random.randint(1, 8) + value[to:]
    if kind == 4:
        return value[:at] + random.choice(WORDS) + value[at:]
    if kind == 5:
        return value[:at] + random.choice(WORDS) + value[to:]
    if kind == 6:
        other = random.choice(others)
        start = random.randint(0, len(other))
        return value[:at] + other[start : start + random.randint(0, 64)] + value[to:]
    return value[:at]


def _structured(seed: bytes, random: Random) -> bytes | None:
    """Return JSON text with a few values replaced, which is also valid YAML, or None if `seed` is not JSON."""
    try:
        value = json.loads(seed)
    except (ValueError, RecursionError):
        return None
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(places) < 500:
        one = waiting.pop()
        inner = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, item in inner:
            places.append((one, key))
            waiting.append(item)
    if not places:
        return json.dumps(random.choice(ODD)).encode()
    for _ in range(random.randint(1, 2)):
        holder, key = random.choice(places)
        kind = random.randrange(4)
        if kind == 0 and isinstance(holder, dict):
            holder[random.choice(("a", "", "a\0b", "x" * 200, "\x1b"))] = holder.pop(key, None)
        elif kind == 1 and isinstance(holder, dict):
            holder.pop(key, None)
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = random.choice(ODD)
    return json.dumps(value).encode()
