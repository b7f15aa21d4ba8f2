"""Looks and parts depend only on settings and size, without gaps or overlaps; each look contains the one before."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mergegate.tasks.evaluation.document_order import (
    CHUNK_SIZE,
    DocumentRange,
    SampleUse,
    document_ranges,
    documents_of_range,
    interim_looks,
    order_documents,
)

totals = st.integers(1, 20_000)
firsts = st.none() | st.integers(1, 30_000)


@pytest.mark.parametrize(
    ("total", "first", "wanted"),
    [
        (1319, 500, (500, 1000, 1319)),
        (14042, 500, (500, 1000, 2000, 4000, 8000, 14042)),
        (1000, 500, (500, 1000)),
        (400, 500, (400,)),
        (500, 500, (500,)),
        (1319, None, (1319,)),
        (1, 1, (1,)),
        (7, 1, (1, 2, 4, 7)),
    ],
)
def test_looks_double_up_to_the_whole_task(total: int, first: int | None, wanted: tuple[int, ...]) -> None:
    assert interim_looks(total, first) == wanted


@given(totals, firsts)
def test_looks_rise_and_each_is_at_most_twice_the_one_before(total: int, first: int | None) -> None:
    found = interim_looks(total, first)
    assert found[-1] == total
    assert found[0] == min(total, first or total)
    assert all(a < b <= 2 * a for a, b in pairwise(found))


@given(totals, st.integers(1, 5_000), st.integers(0, 20_000), st.integers(1, 20_000))
def test_the_next_sample_avoids_the_documents_that_selected_the_release(
    total: int, first: int, start: int, documents: int
) -> None:
    used = SampleUse(start=start % total, documents=min(documents, total))
    following = used.next_start(total, first)
    if first >= total:
        assert following == 0  # there is no other sample
        return
    selecting = {(used.start + at) % total for at in range(used.documents)}
    shared = sum((following + at) % total in selecting for at in range(first))
    assert shared == max(0, first - (total - used.documents))  # only as many as must be shared


def test_a_look_at_all_documents_has_no_other_sample() -> None:
    assert SampleUse(start=0, documents=500).next_start(1319, None) == 0


@pytest.mark.parametrize(("total", "first"), [(0, None), (-1, 5), (10, 0)])
def test_no_documents_are_no_look(total: int, first: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        interim_looks(total, first)


@given(totals, firsts)
def test_parts_follow_each_other_are_small_and_end_at_every_look(total: int, first: int | None) -> None:
    found = document_ranges(total, first)
    assert [part.first for part in found] == [0, *(part.last for part in found[:-1])]
    assert found[-1].last == total
    assert all(0 < part.last - part.first <= CHUNK_SIZE for part in found)
    assert set(interim_looks(total, first)) <= {part.last for part in found}


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_parts_share_out_every_document_once(sizes: dict[str, int], seed: int, data: st.DataObject) -> None:
    total = sum(sizes.values())
    found = [
        (task, doc)
        for part in document_ranges(total, data.draw(st.none() | st.integers(1, total)))
        for task, docs in documents_of_range(sizes, seed, part).items()
        for doc in docs
    ]
    assert sorted(found) == [(task, doc) for task in sorted(sizes) for doc in range(sizes[task])]


def test_documents_of_a_group_are_mixed_and_ascend_within_each_task() -> None:
    found = documents_of_range({"a": 500, "b": 500}, 0, DocumentRange(first=0, last=200))
    assert 60 < len(found["a"]) < 140  # a fair coin, 200 tosses
    assert all(docs == sorted(docs) for docs in found.values())


def test_the_order_is_the_same_on_every_machine() -> None:
    """The expected order is hard-coded, because every key in the store depends on it."""
    assert order_documents({"t": 8}, 0) == [("t", doc) for doc in ORDER]
    assert order_documents({"t": 8}, 1) != order_documents({"t": 8}, 0)


ORDER = (3, 2, 0, 5, 4, 1, 6, 7)


@pytest.mark.parametrize(("first", "last"), [(5, 5), (6, 5), (-1, 5)])
def test_an_empty_range_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValidationError):
        DocumentRange(first=first, last=last)
