"""Build fixtures once and share them between tests, processes and later runs.

Each fixture is a directory below pytest's cache (``pytest --cache-clear`` removes it), named by everything that
determines its content::

    place = kept(request.config, "demo-release", digest_of(PROJECT / "tasks", ...), make)

The first process builds the directory under a lock, and the others wait until it is complete. Tests must not change it;
a test that needs to change something copies it first.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import time
from collections.abc import Callable, Iterable
from importlib.metadata import distributions
from pathlib import Path

import pytest


def kept(config: pytest.Config, name: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return the directory that `make` filled for this `key`; directories of other keys are removed after a day."""
    shelf = config.cache.mkdir("mergegate")
    place = shelf / f"{name}-{key[:16]}"
    with (shelf / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            for old in shelf.glob(f"{name}-*"):
                if time.time() - old.stat().st_mtime > 86_400:  # Another run may still be using a newer one.
                    shutil.rmtree(old)
            unfinished = shelf / f"unfinished-{name}"
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(place)
    return place


def digest_of(sources: Iterable[Path]) -> str:
    """Return the digest of the sources and of all installed package versions."""
    running = hashlib.sha256()
    for source in sources:
        inside = source.rglob("*") if source.is_dir() else [source]
        files = sorted(path for path in inside if path.is_file() and path.suffix != ".pyc")
        for file in files:
            running.update(f"{file.relative_to(source)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    for installed in sorted(f"{found.name} {found.version}" for found in distributions()):
        running.update(installed.encode())
    return running.hexdigest()
