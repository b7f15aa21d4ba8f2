"""Define the JSON files that describe stored content, and receive directories from other machines atomically.

mergegate fetches the files into a temporary directory next to the final one, compares their sizes and hashes with a
list, and then renames the directory. A directory with its final name is therefore complete and correct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mergegate.merge_core.files import fsync, fsync_directories, remove_any, sha256_file
from mergegate.tasks.store.keys import canonical

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
