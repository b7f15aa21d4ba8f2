"""Compute content keys, define the JSON files that describe stored content, and receive directories atomically.

Files of another machine arrive in a temporary directory next to the final one. mergegate compares their sizes and
hashes with a list, and then renames the directory. A directory with its final name is therefore complete and correct.

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
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mergegate.merge_core.files import fsync, fsync_directories, remove_any, sha256_file

MANIFEST = "manifest.json"
ARRIVING = ".arriving.partial"  # Garbage collection recognizes it as unfinished work.


class ListedFile(BaseModel):
    """Size in bytes and sha256 of a file."""

    model_config = ConfigDict(strict=True, frozen=True)

    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ArtifactManifest(BaseModel):
    """Content of ``manifest.json``: the key of the artifact, the digest of its content, and all of its files."""

    model_config = ConfigDict(strict=True, frozen=True)

    key: str
    digest: str
    files: dict[str, ListedFile]


def _with_digest(value: object) -> object:
    canonical(value)  # raises ValueError for numbers such as NaN
    return value


class ValueRecord(BaseModel):
    """Stored result of a stage that writes no files. ``sha256`` is the digest of the field ``value``."""

    model_config = ConfigDict(strict=True, frozen=True)

    key: str
    digest: str
    sha256: str
    value: Annotated[Any, AfterValidator(_with_digest)]


class ContentMismatch(Exception):
    """A received file differs from its listed size or hash. The message names the file."""


def receive_directory(
    final: Path, files: Mapping[str, tuple[int, str]], fetch: Callable[[str, Path], None]
) -> dict[Path, str]:
    """Fetch ``files`` into the new directory ``final``, or leave nothing behind after an error.

    The caller must hold a lock, so that only one process at a time receives this directory.

    Args:
        final: Directory to create. The files of an earlier, interrupted transfer next to it are removed.
        files: Size in bytes and sha256 of each file, by relative name.
        fetch: Function that writes the file with the given name to the given path, whose parent directory exists.

    Returns:
        The sha256 of every file by its final path, so that callers need not hash the files again.

    Raises:
        ContentMismatch: A file differs from its listed size or hash, or its name leads out of the directory.
        Exception: Any error that ``fetch`` raises.
    """
    arriving = final.with_name(final.name + ARRIVING)
    remove_any(arriving)
    try:
        arriving.mkdir(parents=True)
        for name, (size, sha256) in sorted(files.items()):
            path = arriving / name
            if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
                raise ContentMismatch(f"{name!r} is not the name of a file in a directory")
            path.parent.mkdir(parents=True, exist_ok=True)
            fetch(name, path)
            received_size = path.stat().st_size
            if received_size != size:
                raise ContentMismatch(f"{name} has {received_size} bytes instead of {size}")
            if (received_sha256 := sha256_file(path)) != sha256:
                raise ContentMismatch(f"{name}: sha256 is {received_sha256[:12]}… instead of {sha256[:12]}…")
            fsync(path)
        fsync_directories(arriving)
        arriving.rename(final)
    except BaseException:
        remove_any(arriving)
        raise
    fsync(final.parent)
    return {final / name: sha256 for name, (_, sha256) in files.items()}


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
