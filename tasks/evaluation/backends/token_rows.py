"""Pack token sequences into rows in which a shared prefix occurs once.

A row is a flattened tree. Each token attends only to its ancestors, at its position in its own sequence. The network
therefore processes few-shot examples, the question before several answers, and the common beginning of several
answers once per row, without padding::

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

# A row may grow to this multiple of a sequence's length if most of its tokens are shared with the previous sequence.
_LONGER = 3


@dataclass(frozen=True)
class SharedRow:
    """Several token sequences in one row, with shared tokens stored once.

    Args:
        tokens: Token ids, ``[length]``.
        positions: Position of each token in its own sequence, ``[length]``.
        sees: Whether the token at the first index attends to the token at the second, ``[length, length]``.
        sequences: Indices of the sequences in the row.
        paths: For each of these sequences, the indices of its tokens in the row.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    sees: NDArray[np.bool_]
    sequences: tuple[int, ...]
    paths: tuple[NDArray[np.int64], ...]


def token_rows(sequences: Sequence[Sequence[int]], length: int) -> Iterator[SharedRow]:
    """Pack sequences into rows, sorted by their tokens, so that sequences with a long shared prefix are neighbors.

    Each sequence, which must not be empty, occurs in exactly one row of about ``length`` tokens. A single sequence, or
    a few that share most of their tokens, may exceed the length. Packing again without the sequences in the first rows
    yields the remaining rows unchanged.
    """
    order = sorted(range(len(sequences)), key=lambda number: (tuple(sequences[number]), number))
    row: list[int] = []
    size = 0
    for number in order:
        sequence = sequences[number]
        shared = shared_beginning(sequences[row[-1]], sequence) if row else 0
        most = max(length, _LONGER * len(sequence)) if 2 * shared > len(sequence) else length
        if row and size + len(sequence) - shared > most:
            yield _pack(row, sequences)
            row, size, shared = [], 0, 0
        row.append(number)
        size += len(sequence) - shared
    if row:
        yield _pack(row, sequences)


def row_inputs(network: Any, row: SharedRow, start: int = 0) -> dict[str, torch.Tensor | None]:
    """Return a row as inputs of a transformers network, after ``start`` cached tokens that the whole row attends to."""
    import torch

    mask = None  # for a single sequence, for which networks are fastest
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


def shared_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens that two sequences share before they differ."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))


def _pack(numbers: Sequence[int], sequences: Sequence[Sequence[int]]) -> SharedRow:
    tokens: list[int] = []
    positions: list[int] = []
    paths: list[NDArray[np.int64]] = []
    begins: list[tuple[int, int]] = []  # for each sequence: index of its first own token, number of shared tokens
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
