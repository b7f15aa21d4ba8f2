"""Run the threads of a merge, which take the oldest work first.

Work is ordered by a number, which is that of its tensor. So a tensor is finished before the next one starts. Data that
its later passes read again is still in the page cache, and output is written nearly in order.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count


class Workers:
    """A fixed set of threads that process prioritized work.

    Args:
        thread_count: Number of threads.
        on_failure: Function called in the thread with the exception that work raised. No more work starts after it.
    """

    def __init__(self, thread_count: int, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._condition = threading.Condition()
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._counter = count()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"merge-{index}", daemon=True) for index in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, order: int, work: Callable[[], None]) -> None:
        """Queue ``work`` behind all work with a lower ``order``, and behind earlier work with the same."""
        with self._condition:
            heapq.heappush(self._waiting, (order, next(self._counter), work))
            self._condition.notify()

    def stop(self) -> None:
        """Start no more work, and wait until the current work has ended."""
        with self._condition:
            self._stopped = True
            self._waiting.clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                work = heapq.heappop(self._waiting)[2]
            try:
                work()
            except BaseException as failure:
                with self._condition:
                    self._stopped = True
                    self._condition.notify_all()
                self._on_failure(failure)
