"""Content keys: one canonical JSON and one sha256 for everything that decides a result.

A key is ``sha256(canonical JSON of {stage, version, inputs})``. Only what changes the result may be in it, so a field
that does not (a path, a display name, a duration) is marked where it is declared::

    class Model(BaseModel):
        digest: str
        directory: Annotated[Path, NotInKey]

Keys that differ in one input alone may be a *family*: they begin alike, so one listing of a directory finds all of
them, without a second record of what there is.

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

_FAMILY_DIGITS = 16  # of a key that belongs to a family: those that all of its members share


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


def stage_key(stage: str, version: int, inputs: Mapping[str, object], apart: str | None = None) -> str:
    """Key of one run of a stage: 64 hex digits over its name, its version and its inputs.

    Args:
        apart: The input that tells the members of a family apart. The key then begins with ``family_prefix``.
    """
    key = digest({"stage": stage, "version": version, "inputs": dict(inputs)})
    return key if apart is None else family_prefix(stage, version, inputs, apart) + key[_FAMILY_DIGITS:]


def family_prefix(stage: str, version: int, inputs: Mapping[str, object], apart: str) -> str:
    """How every key begins that differs from others in the input ``apart`` alone: 16 hex digits. Two families may share
    them by chance, so whoever finds a member compares its whole key."""
    others = {name: value for name, value in inputs.items() if name != apart}
    return digest({"stage": stage, "version": version, "apart": apart, "inputs": others})[:_FAMILY_DIGITS]


def merkle(files: Mapping[str, tuple[int, str]]) -> str:
    """Digest of a set of files, ``{relative name: (size in bytes, sha256)}``, whatever their order."""
    return digest({name: [size, sha256] for name, (size, sha256) in files.items()})
