"""An anchor that serves many runs remembers its refusals, which make the next pass harder."""

from __future__ import annotations

import pytest

from mergegate.tasks.gate.alpha_spending import anchor_confidence, count_refusals, record_refusal
from mergegate.tasks.stage import home as home_of

ANCHOR, OTHER = "a" * 64, "b" * 64

pytestmark = pytest.mark.usefixtures("home")


def test_all_refusals_together_spend_one_error() -> None:
    spent = [1 - anchor_confidence(0.95, refusals) for refusals in range(1000)]
    assert sum(spent) == pytest.approx(0.05, rel=2e-3)
    assert sum(spent) < 0.05
    assert spent == sorted(spent, reverse=True)


def test_a_merge_counts_once_and_not_for_itself() -> None:
    for merge in ("m1", "m2", "m1"):
        record_refusal(ANCHOR, merge)
    assert count_refusals(ANCHOR) == 2
    assert count_refusals(ANCHOR, except_merge="m1") == 1
    assert count_refusals(OTHER) == 0


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"{", b"[1, null]", b'{"a": 1}', b"null"])
def test_a_damaged_record_counts_as_missing(garbage: bytes) -> None:
    record_refusal(ANCHOR, "m1")
    (record,) = (home_of() / "anchors").glob("*.json")
    record.write_bytes(garbage)
    assert count_refusals(ANCHOR) == 0
    record_refusal(ANCHOR, "m2")
    assert count_refusals(ANCHOR) == 1
