"""Sequences of tokens laid into rows, in which a beginning that several of them share stands once.

A row is a tree written flat: each token sees its ancestors and nothing else, at the position that it has in its own
sequence. So the examples before a task's questions, a question before its answers, an answer that begins as another
does are read once a row, whoever shares them, and nothing is padded::

    the sky is blue        tokens     the sky is blue red the sea is
    the sky is red    →    positions   0   1   2   3   3   1 ...
    the sea is             blue sees "the sky is", red too, but not blue
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# A row may be so many times as long as a sequence that shares more than half of itself with the one before it.
_LONGER = 3


@dataclass(frozen=True)
class SharedRow:
    """One row.

    Args:
        tokens: Ids, ``[length]``.
        positions: Of each in its own sequence, ``[length]``.
        sees: Whether the token at the first index sees that at the second, ``[length, length]``.
        sequences: Numbers of the sequences that lie in it.
        paths: Of each of them, where its tokens stand.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    sees: NDArray[np.bool_]
    sequences: tuple[int, ...]
    paths: tuple[NDArray[np.int64], ...]


def token_rows(sequences: Sequence[Sequence[int]], length: int) -> Iterator[SharedRow]:
    """Rows in which every sequence lies once, in the order of their tokens, so that those that share most are
    neighbours. What is left of the sequences after any row is laid as it would have been.

    Args:
        sequences: Of ids; none is empty.
        length: Tokens of a row, where a single sequence is not longer, nor a few that share most of themselves.
    """
    order = sorted(range(len(sequences)), key=lambda number: (tuple(sequences[number]), number))
    row: list[int] = []
    size = 0
    for number in order:
        sequence = sequences[number]
        shared = shared_beginning(sequences[row[-1]], sequence) if row else 0
        most = max(length, _LONGER * len(sequence)) if 2 * shared > len(sequence) else length
        if row and size + len(sequence) - shared > most:
            yield _laid(row, sequences)
            row, size, shared = [], 0, 0
        row.append(number)
        size += len(sequence) - shared
    if row:
        yield _laid(row, sequences)


def row_inputs(network: Any, row: SharedRow, start: int = 0) -> dict[str, torch.Tensor | None]:
    """A row as a network of transformers takes it, behind ``start`` tokens that it has kept, which all of it sees."""
    import torch

    mask = None  # of a sequence alone: what networks are quickest at
    if len(row.sequences) > 1:
        sees = torch.from_numpy(np.pad(row.sees, ((0, 0), (start, 0)), constant_values=True)).to(network.device)
        dtype = next(network.parameters()).dtype
        mask = torch.zeros((1, 1, *sees.shape), dtype=dtype, device=network.device)
        mask.masked_fill_(~sees, torch.finfo(dtype).min)
    return {
        "input_ids": torch.from_numpy(row.tokens).to(network.device)[None],
        "position_ids": torch.from_numpy(row.positions + start).to(network.device)[None],
        "attention_mask": mask,
    }


def shared_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common before they differ."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def _laid(numbers: Sequence[int], sequences: Sequence[Sequence[int]]) -> SharedRow:
    tokens: list[int] = []
    positions: list[int] = []
    paths: list[NDArray[np.int64]] = []
    begins: list[tuple[int, int]] = []  # of each sequence: where its own tokens begin, and how many it shares
    for number in numbers:
        sequence = sequences[number]
        shared = shared_beginning(sequences[numbers[len(paths) - 1]], sequence) if paths else 0
        own = np.arange(len(tokens), len(tokens) + len(sequence) - shared)
        begins.append((len(tokens), shared))
        paths.append(np.concatenate([paths[-1][:shared], own]) if paths else own)
        tokens.extend(sequence[shared:])
        positions.extend(range(shared, len(sequence)))
    sees = np.zeros((len(tokens), len(tokens)), np.bool_)
    for (begin, shared), path in zip(begins, paths, strict=True):
        count = len(path) - shared
        sees[begin : begin + count, path[:shared]] = True
        sees[begin : begin + count, begin : begin + count] = np.tri(count, dtype=np.bool_)
    return SharedRow(np.array(tokens), np.array(positions), sees, tuple(numbers), tuple(paths))
