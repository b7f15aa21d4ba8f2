"""The store that machines share, as the environment says it.

``MERGEGATE_STORE=s3://bucket/prefix`` (any address of fsspec) stands behind the local store. ``MERGEGATE_SHARE_UP_TO``
is how large an artifact may be to be shared: scores, perplexities and explanations always are, a merge is where there
is room for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from mergegate.merge_core.wording import parse_bytes
from mergegate.tasks.stage.progress import announce
from mergegate.tasks.stage.project import home
from mergegate.tasks.store import SharedStore, require_shared

SHARED_STORE, SHARE_UP_TO = "MERGEGATE_STORE", "MERGEGATE_SHARE_UP_TO"
_DEFAULT_SIZE = "1GB"
# As large as its model: each machine makes its own rather than wait for one that may not be shared in the end.
_NOT_WAITED_FOR = frozenset({"merge"})


def shared_store(root: Path) -> SharedStore | None:
    """The shared store behind the local one at ``root``; None where there is none.

    Raises:
        InvalidInput: for an address that fsspec does not know, or a size that is none.
    """
    address = os.environ.get(SHARED_STORE, "").strip()
    size = os.environ.get(SHARE_UP_TO, "").strip() or _DEFAULT_SIZE
    return _shared(address, root, size) if address else None


@contextmanager
def log_shared_store_savings() -> Iterator[None]:
    """Say at the end of the block what the shared store has saved this machine, in a line; nothing where it is nothing.

    Raises:
        InvalidInput: at the beginning, as :func:`shared_store`.
    """
    shared = shared_store(home() / "store")
    before = shared.arrived.copy() if shared else None
    yield
    if shared is not None and before is not None and (here := shared.arrived - before):
        counts = ", ".join(f"{count} of {stage}" for stage, count in sorted(here.items()))
        announce(f"made elsewhere, and fetched from {shared.address}: {counts}")


@cache
def _shared(address: str, root: Path, size: str) -> SharedStore:
    """One a process: it has a thread that sends, and connections."""
    require_shared(address, SHARED_STORE)
    return SharedStore(address, root, parse_bytes(size, SHARE_UP_TO), _NOT_WAITED_FOR)
