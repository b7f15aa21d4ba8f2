"""Packed rows: each token attends only to its own sequence, at any position and with shared prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mergegate.tasks.evaluation.backends.token_rows import shared_beginning, token_rows

# Few distinct tokens, so that sequences share prefixes.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=14)


@given(SEQUENCES, st.integers(1, 40))
def test_every_sequence_is_packed_once_and_attends_only_to_itself(sequences: list[list[int]], length: int) -> None:
    found = []
    for row in token_rows(sequences, length):
        found.extend(row.sequences)
        for number, path in zip(row.sequences, row.paths, strict=True):
            assert row.tokens[path].tolist() == sequences[number]
            assert row.positions[path].tolist() == list(range(len(path)))
            for depth, place in enumerate(path):
                assert sorted(np.flatnonzero(row.sees[place])) == sorted(path[: depth + 1])
    assert sorted(found) == list(range(len(sequences)))


@given(SEQUENCES, st.integers(1, 40))
def test_a_shared_prefix_is_packed_once_within_the_row_length(sequences: list[list[int]], length: int) -> None:
    for row in token_rows(sequences, length):
        beginnings = {tuple(sequences[number][:end]) for number in row.sequences for end in range(1, 13)}
        assert len(row.tokens) == len(beginnings), "one token for each different beginning"
        longest = max(len(sequences[number]) for number in row.sequences)
        assert len(row.tokens) <= max(length, 3 * longest)


@given(SEQUENCES, st.integers(1, 20))
def test_remaining_sequences_are_packed_like_before(sequences: list[list[int]], length: int) -> None:
    """A resumed run therefore computes the same batches."""
    rows = list(token_rows(sequences, length))
    for done in range(1, len(rows)):
        answered = {number for row in rows[:done] for number in row.sequences}
        left = [number for number in range(len(sequences)) if number not in answered]
        again = list(token_rows([sequences[number] for number in left], length))
        assert [[left[number] for number in row.sequences] for row in again] == [list(r.sequences) for r in rows[done:]]


def test_shared_beginning_of_two_sequences() -> None:
    assert [shared_beginning(*pair) for pair in (([1, 2], [1, 3]), ([1], [1, 2]), ([2], [1]))] == [1, 1, 0]
