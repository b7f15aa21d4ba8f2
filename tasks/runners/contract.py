"""The operations that mergegate needs of a cluster. ``dask_cluster`` and ``ray_cluster`` implement them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prefect import Task


class WorkerLost(Exception):
    """The workers of an item died."""


class Cluster(Protocol):
    """A Dask or Ray cluster."""

    workers: int  # number of parallel items

    def submit(self, task: Task[..., Any], order: bytes, on_outcome: Callable[[Any], None]) -> Any:
        """Submit ``task(order)`` and return a handle for ``cancel``.

        ``on_outcome`` is called, in any thread, with the state of the task or with the exception that replaced it.
        """

    def cancel(self, future: Any) -> None:
        """Cancel an item. It may continue if it is already running."""

    def close(self) -> None:
        """Stop what mergegate started."""


def outcome_of(future: Any, death: Callable[[BaseException], str]) -> Any:
    """Return the outcome of a finished future: its result, or its exception.

    Args:
        future: Future of Dask or Ray.
        death: Describes how the workers died, or returns an empty string if an exception has another cause. The outcome
            is then ``WorkerLost`` with this description.
    """
    try:
        return future.result()
    except BaseException as error:
        if description := death(error):
            return WorkerLost(description)
        return error if isinstance(error, Exception) else RuntimeError(repr(error))
