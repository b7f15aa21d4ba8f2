"""Content keys: one canonical JSON and one sha256 for everything that decides a result.

A key is ``sha256(canonical JSON of {stage, version, inputs})``. Only what changes the result may be in it, so a field
that does not (a path, a display name, a duration) is marked where it is declared::

    class Model(BaseModel):
        digest: str
        directory: Annotated[Path, NotInKey]

Values without an obvious canonical form (sets, arbitrary objects, NaN) are refused rather than guessed at: an unstable
key silently recomputes every night.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel


class _NotInKey:
    """Marks a pydantic field that does not decide any result: it stays out of every key and digest."""

    def __repr__(self) -> str:
        return "NotInKey"


NotInKey = _NotInKey()


def canonical(value: object) -> Any:
    """Reduce ``value`` to plain JSON types in one fixed form.

    Objects may take part by offering ``content_key() -> object``. Pydantic models become ``{field: value}`` without the
    fields marked ``NotInKey``.

    Raises:
        TypeError: for a type that has no stable form, naming it.
        ValueError: for NaN and infinities, which are not JSON.
    """
    if hasattr(value, "content_key"):
        return canonical(value.content_key())
    if isinstance(value, Enum):
        return canonical(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} has no canonical JSON form")
        return value
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {name: canonical(getattr(value, name)) for name in fields if NotInKey not in fields[name].metadata}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("only string keys have a canonical JSON form")
        return {key: canonical(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")


def digest(value: object) -> str:
    """sha256 (64 hex digits) of the canonical JSON of ``value``."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def stage_key(stage: str, version: int, inputs: Mapping[str, object]) -> str:
    """Key of one run of a stage: 64 hex digits over its name, its version and its inputs."""
    return digest({"stage": stage, "version": version, "inputs": dict(inputs)})


def merkle(files: Mapping[str, tuple[int, str]]) -> str:
    """Digest of a set of files, ``{relative name: (size in bytes, sha256)}``, whatever their order."""
    return digest({name: [size, sha256] for name, (size, sha256) in files.items()})
