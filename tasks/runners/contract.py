"""Define what mergegate requires of a cluster. ``dask_cluster`` and ``ray_cluster`` implement it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prefect import Task


class WorkerLost(Exception):
    """The workers died at every attempt to process an item."""


class Cluster(Protocol):
    """A Dask or Ray cluster."""

    workers: int  # number of parallel items

    def submit(self, task: Task[..., Any], order: bytes, on_outcome: Callable[[Any], None]) -> Any:
        """Submit ``task(order)`` and return a future that ``cancel`` accepts.

        When the task ends, the cluster calls ``on_outcome``, in any thread, with the task's state or its exception.
        """

    def cancel(self, future: Any) -> None:
        """Cancel a submitted task. A task that is already running may continue."""

    def close(self) -> None:
        """Stop the cluster if mergegate started it."""


def outcome_of(future: Any, death: Callable[[BaseException], str]) -> Any:
    """Return the result of a finished future, or the exception that it raised.

    Args:
        future: Future of Dask or Ray.
        death: Function that describes how the workers died, or returns an empty string if the exception has another
            cause. ``outcome_of`` returns a ``WorkerLost`` with this description.
    """
    try:
        return future.result()
    except BaseException as error:
        if description := death(error):
            return WorkerLost(description)
        return error if isinstance(error, Exception) else RuntimeError(repr(error))
