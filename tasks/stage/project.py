"""Read the environment of a project: its home directory, its variables, and the shared store that they configure.

``MERGEGATE_SHARED_STORE=s3://bucket/prefix`` is the address of a shared store behind the local one. It may be any
address that fsspec supports. ``MERGEGATE_SHARED_STORE_MAX_SIZE`` is the size limit of shared artifacts (default: 1 GB).
Scores, perplexities and explanations are small enough to be shared; a merge is shared only if it is below the limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import parse_bytes
from mergegate.tasks.stage.progress import announce
from mergegate.tasks.store import SharedStore, require_shared

SHARED_STORE, MAX_SIZE = "MERGEGATE_SHARED_STORE", "MERGEGATE_SHARED_STORE_MAX_SIZE"
_DEFAULT_MAX_SIZE = "1GB"
# A merge is as large as its model and may exceed the limit. So machines do not wait for each other's merges.
_UNLEASED_STAGES = frozenset({"merge"})

RENAMED_VARIABLES: Mapping[str, str] = {
    "MERGEGATE_QUOTA": "MERGEGATE_STORE_QUOTA",
    "MERGEGATE_STORE": "MERGEGATE_SHARED_STORE",
    "MERGEGATE_SHARE_UP_TO": "MERGEGATE_SHARED_STORE_MAX_SIZE",
}
"""Former names of environment variables, with their present names."""


def home() -> Path:
    """Return the absolute path of ``$MERGEGATE_HOME``, by default ``.mergegate`` in the working directory.

    The directory may not exist.
    """
    return Path(os.environ.get("MERGEGATE_HOME", ".mergegate")).absolute()


def environment_setting(variable: str) -> str:
    """Return the value of an environment variable without surrounding blanks, or an empty string.

    Raises:
        InvalidInput: The variable is set under its former name.
    """
    for former, current in RENAMED_VARIABLES.items():
        if current == variable and former in os.environ:
            raise InvalidInput(former, found="an environment variable that was renamed", remedy=f"set {current}")
    return os.environ.get(variable, "").strip()


def nearest_directory(path: Path) -> Path:
    """Return the directory ``path`` if it exists, or its closest parent that does."""
    absolute = path.absolute()
    return next(directory for directory in (absolute, *absolute.parents) if directory.is_dir())


def shared_store(root: Path) -> SharedStore | None:
    """Return the shared store behind the local one at ``root``, or None if none is configured.

    Raises:
        InvalidInput: fsspec does not support the address, or the size limit is not valid.
    """
    address = environment_setting(SHARED_STORE)
    size = environment_setting(MAX_SIZE) or _DEFAULT_MAX_SIZE
    return _open_shared_store(address, root, size) if address else None


@contextmanager
def log_shared_store_savings() -> Iterator[None]:
    """Announce at the end of the block how many artifacts the shared store provided, if any.

    Raises:
        InvalidInput: The configuration is not valid. See :func:`shared_store`. Raised before the block runs.
    """
    shared = shared_store(home() / "store")
    before = shared.fetch_counts.copy() if shared else None
    yield
    if shared is not None and before is not None and (arrived := shared.fetch_counts - before):
        counts = ", ".join(f"{count} of {stage}" for stage, count in sorted(arrived.items()))
        announce(f"fetched from {shared.address} instead of built: {counts}")


@cache
def _open_shared_store(address: str, root: Path, size: str) -> SharedStore:
    """Return the only client of this process, because it owns a sender thread and connections."""
    require_shared(address, SHARED_STORE)
    return SharedStore(address, root, parse_bytes(size, MAX_SIZE), _UNLEASED_STAGES)
