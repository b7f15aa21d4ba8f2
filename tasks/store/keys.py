"""Compute content keys: the sha256 of the canonical JSON of everything that determines a result.

A key is ``sha256(canonical JSON of {stage, version, inputs})`` and covers only inputs that change the result. Fields
that do not change it, such as a path or a display name, are marked in their declaration::

    class Model(BaseModel):
        digest: str
        directory: Annotated[Path, NotInKey]

Keys that differ in a single input may form a *family*. They share a prefix, so one directory listing finds all members.

Values without a canonical form (sets, arbitrary objects, NaN) raise an error, because an unstable key would make every
run repeat the stage without notice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

V = TypeVar("V")


class _NotInKey:
    """Marker for a pydantic field that does not change any result. Keys and digests omit such fields."""

    def __repr__(self) -> str:
        return "NotInKey"


NotInKey = _NotInKey()

_FAMILY_DIGITS = 16  # Number of leading digits of a key that all members of its family share.


def canonical(value: object) -> Any:
    """Convert a value to plain JSON types in a unique form.

    An object may define this form in a method ``content_key() -> object``. A pydantic model becomes a dict of its
    fields without those marked ``NotInKey``.

    Raises:
        TypeError: A type has no canonical form. The message names the type.
        ValueError: A number is NaN or infinite, which JSON cannot represent.
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


def without_unkeyed(value: V) -> V:
    """Return ``value`` with the default, or an empty text, in every field that is marked ``NotInKey``."""
    original: Any = value
    changed: Any = value
    if isinstance(original, BaseModel):
        update = {}
        for name, field in type(original).model_fields.items():
            old = getattr(original, name)
            if NotInKey in field.metadata:
                update[name] = "" if field.is_required() else field.get_default(call_default_factory=True)
            else:
                update[name] = without_unkeyed(old)
        changed = original.model_copy(update=update)
    elif type(original) in (list, tuple):
        changed = type(original)(map(without_unkeyed, original))
    elif type(original) is dict:
        changed = {key: without_unkeyed(item) for key, item in original.items()}
    return changed  # type: ignore[no-any-return]  # has the type of ``value``


def digest(value: object) -> str:
    """Return the sha256 of the canonical JSON of ``value`` as 64 hex digits."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def stage_key(stage: str, version: int, inputs: Mapping[str, object], varying_input: str | None = None) -> str:
    """Return the key of one stage call: 64 hex digits.

    ``varying_input`` names the input in which the members of a family differ. The key then begins with
    :func:`family_prefix`. Default: the key belongs to no family.
    """
    key = digest({"stage": stage, "version": version, "inputs": dict(inputs)})
    return key if varying_input is None else family_prefix(stage, version, inputs, varying_input) + key[_FAMILY_DIGITS:]


def family_prefix(stage: str, version: int, inputs: Mapping[str, object], varying_input: str) -> str:
    """Return the 16 hex digits with which all keys of a family begin.

    The keys differ only in ``varying_input``. Two families may share a prefix by chance, so callers must also compare
    the rest of each key.
    """
    common = {name: value for name, value in inputs.items() if name != varying_input}
    return digest({"stage": stage, "version": version, "apart": varying_input, "inputs": common})[:_FAMILY_DIGITS]


def merkle(files: Mapping[str, tuple[int, str]]) -> str:
    """Return the digest of a set of files, given as ``{relative name: (size in bytes, sha256)}`` in any order."""
    return digest({name: [size, sha256] for name, (size, sha256) in files.items()})
