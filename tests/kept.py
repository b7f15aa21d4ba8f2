"""What is made once and looked at by many tests, in whichever process they run and in the runs after this one.

A directory below pytest's cache (``pytest --cache-clear`` forgets it), named by what decides its content::

    place = kept(request.config, "demo-release", digest_of(PROJECT / "tasks", ...), make)

Whoever comes first makes it, under a lock; the others wait for that and find it whole. It is not to be changed: a test
that changes something copies it.
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
    """The directory that ``make`` has filled for this ``key``. Those of other keys are forgotten after a day."""
    assert config.cache is not None
    shelf = config.cache.mkdir("mergegate")
    place = shelf / f"{name}-{key[:16]}"
    with (shelf / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            for old in shelf.glob(f"{name}-*"):
                if time.time() - old.stat().st_mtime > 86_400:  # before that, another run may be looking at it
                    shutil.rmtree(old)
            unfinished = shelf / f"unfinished-{name}"
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(place)
    return place


def digest_of(sources: Iterable[Path]) -> str:
    """Of all that decides what this project makes here: its sources and the versions of what is installed."""
    running = hashlib.sha256()
    for source in sources:
        inside = source.rglob("*") if source.is_dir() else [source]
        files = sorted(path for path in inside if path.is_file() and path.suffix != ".pyc")
        for file in files:
            running.update(f"{file.relative_to(source)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    for installed in sorted(f"{found.name} {found.version}" for found in distributions()):
        running.update(installed.encode())
    return running.hexdigest()
