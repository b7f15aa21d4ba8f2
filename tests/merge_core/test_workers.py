"""The threads of a merge take the oldest work first and begin nothing after a failure."""

from __future__ import annotations

import threading

from patience import HANG_S

from mergegate.merge_core.engine.execution import Workers


def ignore(failure: BaseException) -> None:
    raise AssertionError(failure)


def test_the_oldest_tensor_is_processed_first_and_its_blocks_in_order() -> None:
    gate, done, seen = threading.Event(), threading.Event(), []
    workers = Workers(1, ignore)
    workers.submit(0, gate.wait)  # The following work is queued when the thread becomes free.
    for order, block in [(2, "a"), (1, "a"), (1, "b"), (0, "a")]:
        workers.submit(order, lambda order=order, block=block: seen.append((order, block)))  # type: ignore[misc]
    workers.submit(9, done.set)
    gate.set()
    assert done.wait(HANG_S)
    workers.stop()
    assert seen == [(0, "a"), (1, "a"), (1, "b"), (2, "a")]


def test_no_work_starts_after_a_failure_and_the_failure_is_reported() -> None:
    gate, failed, told, seen = threading.Event(), threading.Event(), [], []

    def fail() -> None:
        gate.wait()
        raise ValueError("broken")

    def tell(failure: BaseException) -> None:
        told.append(str(failure))
        failed.set()

    workers = Workers(1, tell)
    workers.submit(0, fail)
    workers.submit(1, lambda: seen.append("begun"))
    gate.set()
    assert failed.wait(HANG_S)
    workers.stop()
    assert told == ["broken"]
    assert seen == []


def test_stopping_waits_for_running_work_and_drops_queued_work() -> None:
    began, gate, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        began.set()
        gate.wait()
        seen.append("ended")

    workers = Workers(1, ignore)
    workers.submit(0, work)
    workers.submit(1, lambda: seen.append("begun"))
    assert began.wait(HANG_S)
    stopper = threading.Thread(target=workers.stop)
    stopper.start()
    with workers._condition:
        assert workers._condition.wait_for(lambda: workers._stopped, HANG_S)
    gate.set()
    stopper.join(HANG_S)
    assert seen == ["ended"]
