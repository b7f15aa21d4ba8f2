"""Read the environment variables of a project, and open the shared store that they configure.

``MERGEGATE_SHARED_STORE=s3://bucket/prefix`` sets the address of a shared store, from which artifacts are fetched that
the local store does not have. It may be any address that fsspec supports. ``MERGEGATE_SHARED_STORE_MAX_SIZE`` is the
largest size of an artifact that is shared. The default of 1 GB excludes most merges, but not scores or explanations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from mergegate.merge_core.wording import parse_bytes
from mergegate.tasks.base.stage.progress import announce
from mergegate.tasks.base.store import SharedStore, require_shared

SHARED_STORE, MAX_SIZE = "MERGEGATE_SHARED_STORE", "MERGEGATE_SHARED_STORE_MAX_SIZE"
_DEFAULT_MAX_SIZE = "1GB"
# Machines do not wait for each other's merges, because a merge is often too large to be shared.
_UNLEASED_STAGES = frozenset({"merge"})


def home() -> Path:
    """Return the absolute path of the project's home directory, which may not exist yet.

    It is ``$MERGEGATE_HOME``, or ``.mergegate`` in the working directory.
    """
    return Path(os.environ.get("MERGEGATE_HOME", ".mergegate")).absolute()


def environment_setting(variable: str) -> str:
    """Return the value of an environment variable without surrounding blanks. Empty if it is not set."""
    return os.environ.get(variable, "").strip()


def nearest_directory(path: Path) -> Path:
    """Return ``path`` if it is a directory, or its closest parent that is one."""
    absolute = path.absolute()
    return next(directory for directory in (absolute, *absolute.parents) if directory.is_dir())


def shared_store(root: Path) -> SharedStore | None:
    """Return the shared store for the local store at ``root``, or None if the environment configures none.

    Raises:
        InvalidInput: fsspec does not support the address, or the size limit is not valid.
    """
    address = environment_setting(SHARED_STORE)
    size = environment_setting(MAX_SIZE) or _DEFAULT_MAX_SIZE
    return _open_shared_store(address, root, size) if address else None


@contextmanager
def log_shared_store_savings() -> Iterator[None]:
    """Announce at the end of the block how many artifacts were fetched from the shared store, if any.

    Raises:
        InvalidInput: The shared store is not configured correctly (see :func:`shared_store`). The block does not run.
    """
    shared = shared_store(home() / "store")
    before = shared.fetch_counts.copy() if shared else None
    yield
    if shared is not None and before is not None and (arrived := shared.fetch_counts - before):
        counts = ", ".join(f"{count} of {stage}" for stage, count in sorted(arrived.items()))
        announce(f"fetched from {shared.address} instead of built: {counts}")


@cache
def _open_shared_store(address: str, root: Path, size: str) -> SharedStore:
    """Return the client for this address. There is one per process, because it owns a thread and connections."""
    require_shared(address, SHARED_STORE)
    return SharedStore(address, root, parse_bytes(size, MAX_SIZE), _UNLEASED_STAGES)
