"""Looking whether there is anything to do: a flow's story is told, and nothing is made, fetched, sent or hashed.

::

    with looking():
        outcome = make_release(profile)     # raises WorkRequired at the first thing that is not there yet

Inside, a stage says what the store has of it, a step that all it does is done, and the hash of a file is the one that
is remembered. So what comes out is what a run would come to, decided by the same code over the same inputs; a run in
which anything would have to be done does not get that far.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_looking: ContextVar[bool] = ContextVar("looking", default=False)


class WorkRequired(BaseException):
    """Something would have to be done. Like an interrupt no ``Exception``: nobody on the way takes it for his own."""


@contextmanager
def dry_pass() -> Iterator[None]:
    """Only look, for as long as the block takes.

    Raises:
        WorkRequired: where that does not suffice.
    """
    token = _looking.set(True)
    try:
        yield
    finally:
        _looking.reset(token)


def is_looking() -> bool:
    """Whether nothing may be done."""
    return _looking.get()


def require_work_allowed(what: str) -> None:
    """To be called before anything is done that a look must not do.

    Raises:
        WorkRequired: naming it, where we only look.
    """
    if _looking.get():
        raise WorkRequired(what)
