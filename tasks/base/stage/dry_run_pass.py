"""Run a flow as a dry pass, against the cache only, to find out whether there is any work.

::

    with dry_pass():
        outcome = make_release(profile)     # raises WorkRequired at the first piece of work

In a dry pass, each stage returns its stored artifact, each step confirms that it has nothing left to do, and file
hashes come from the cache. If the flow reaches its end, its outcome equals that of a normal run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_dry_pass: ContextVar[bool] = ContextVar("dry pass", default=False)


class WorkRequired(BaseException):
    """Raised when a dry pass finds work to do.

    Like KeyboardInterrupt, this is not an ``Exception``, so that no handler on the way catches it.
    """


@contextmanager
def dry_pass() -> Iterator[None]:
    """Run the block as a dry pass, which raises WorkRequired if there is work to do."""
    token = _dry_pass.set(True)
    try:
        yield
    finally:
        _dry_pass.reset(token)


def is_dry_pass() -> bool:
    """Return whether a dry pass is running."""
    return _dry_pass.get()


def require_work_allowed(work: str) -> None:
    """Raise WorkRequired if a dry pass is running. Call this before real work, which ``work`` describes."""
    if _dry_pass.get():
        raise WorkRequired(work)
