"""Run a flow as a dry pass, against the cache only, to find out whether there is any work.

::

    with dry_pass():
        outcome = make_release(profile)     # raises WorkRequired at the first piece of work

In a dry pass, each stage returns its stored artifact, each step confirms that it has nothing left to do, and file
hashes come from the cache. The outcome is the same as that of a normal run, because the same code decides it from the
same inputs. If there is work to do, the dry pass ends early with WorkRequired.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_dry_pass: ContextVar[bool] = ContextVar("dry pass", default=False)


class WorkRequired(BaseException):
    """The dry pass has reached work to do.

    Like KeyboardInterrupt, this is not an ``Exception``, so that no handler on the way catches it.
    """


@contextmanager
def dry_pass() -> Iterator[None]:
    """Run the block as a dry pass.

    Raises:
        WorkRequired: There is work to do.
    """
    token = _dry_pass.set(True)
    try:
        yield
    finally:
        _dry_pass.reset(token)


def is_dry_pass() -> bool:
    """Return whether a dry pass is running, in which no work may be done."""
    return _dry_pass.get()


def require_work_allowed(work: str) -> None:
    """Stop a dry pass before it would do real work. Call this before the work.

    Args:
        work: Description of the work.

    Raises:
        WorkRequired: A dry pass is running.
    """
    if _dry_pass.get():
        raise WorkRequired(work)
