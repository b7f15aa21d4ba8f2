"""Compute tokens that several sequences share only once: for scoring in packed rows, and for the cache of a batch.

A row is a flattened tree. Each token attends only to its ancestors, at its position in its own sequence. The network
therefore processes few-shot examples, the question before several answers, and the common beginning of several
answers once per row, without padding::

    the sky is blue        tokens     the sky is blue red the sea is
    the sky is red    →    positions   0   1   2   3   3   1 ...
    the sea is             blue sees "the sky is", red too, but not blue

To generate answers, lm-eval pads prompts on the left to the longest of the batch and processes them together. Here, the
shared prefix is computed once, the parts after it are packed into rows, and the resulting keys and values are copied to
the positions that they would have with padding. Attention and position ids are unchanged::

    . . A B C x        A B C              "A B C" is computed once, for both
    A B C y z w   →          y z          one row after it; x and w are computed with the first generated token

The cache has spare room, so that adding a token does not copy the existing ones. transformers' ``DynamicCache``
copies every layer for each new token. For sixteen sequences of 560 tokens and a model of 135 M parameters, copying
took a fifth of the time per token, and far more when memory bandwidth was scarce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, DynamicLayer

# A row may grow to this multiple of a sequence's length if most of its tokens are shared with the previous sequence.
_LONGER = 3


@dataclass(frozen=True)
class SharedRow:
    """Several token sequences in one row, with shared tokens stored once."""

    tokens: NDArray[np.int64]  # ids, ``[length]``
    positions: NDArray[np.int64]  # of each token in its own sequence, ``[length]``
    sees: NDArray[np.bool_]  # whether the token at the first index attends to that at the second, ``[length, length]``
    sequences: tuple[int, ...]  # indices of the sequences in the row
    paths: tuple[NDArray[np.int64], ...]  # for each of these sequences, the indices of its tokens in the row


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


# With fewer shared tokens, or a single prompt, two forward passes take longer than one.
_MIN_SHARED = 16
# Spare tokens in each allocation. Only a new allocation copies anything.
_ROOM = 256


def common_start(tokens: torch.Tensor, mask: torch.Tensor) -> int:
    """Return the number of tokens that all prompts of a batch share, or 0 if too few to be worth sharing.

    The last token of a prompt never counts as shared. ``tokens``, ``[prompts, length]``, is padded on the left.
    ``mask`` has the same shape: 1 for tokens of the prompt, 0 for padding.
    """
    first, *further = _without_padding(tokens, mask)
    common = min((shared_beginning(first, prompt) for prompt in further), default=0)
    common = min(common, *(len(prompt) - 1 for prompt in (first, *further)))
    return common if common >= _MIN_SHARED else 0


def cache_prompts(network: Any, tokens: torch.Tensor, mask: torch.Tensor, row_tokens: int) -> Any:
    """Return the key-value cache of all tokens except the last one of each prompt, with room for generated tokens.

    The cache has ``length - 1`` tokens, with zeros at padded positions. For ``tokens`` and ``mask``, see
    ``common_start``. A row has at most ``row_tokens`` tokens, unless a single prompt is longer.
    """
    prompts = _without_padding(tokens, mask)
    start = common_start(tokens, mask)
    cache = growing_cache()

    def copy_states(number: int, row_cache: Any, indices: slice | torch.Tensor, offset: int) -> None:
        """Copy the states at ``indices`` of a row to a prompt, after the first ``offset`` tokens of the prompt."""
        if not cache.layers:
            for index, layer in enumerate(row_cache.layers):
                sizes = [
                    (len(prompts), s.shape[1], tokens.shape[1] - 1, s.shape[3]) for s in (layer.keys, layer.values)
                ]
                cache.update(*(layer.keys.new_zeros(size) for size in sizes), index)
        begin = tokens.shape[1] - len(prompts[number]) + offset
        for layer, row_layer in zip(cache.layers, row_cache.layers, strict=True):
            for target, states in ((layer.keys, row_layer.keys), (layer.values, row_layer.values)):
                selected = states[0, :, indices]
                target[number, :, begin : begin + selected.shape[1]] = selected

    with torch.no_grad():
        prefix_cache = growing_cache()
        if start:
            ids = torch.tensor([prompts[0][:start]], device=tokens.device)
            network(input_ids=ids, past_key_values=prefix_cache, use_cache=True, logits_to_keep=1)
            for number in range(len(prompts)):
                copy_states(number, prefix_cache, slice(0, start), 0)
        longer = [number for number, prompt in enumerate(prompts) if len(prompt) > start + 1]
        for row in token_rows([prompts[number][start:-1] for number in longer], row_tokens):
            network(**row_inputs(network, row, start), past_key_values=prefix_cache, use_cache=True, logits_to_keep=1)
            for number, path in zip(row.sequences, row.paths, strict=True):
                copy_states(longer[number], prefix_cache, torch.from_numpy(path + start).to(tokens.device), start)
            prefix_cache.crop(-len(row.tokens))
    return cache


def _without_padding(tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[is_token.bool()].tolist() for row, is_token in zip(tokens, mask, strict=True)]


def growing_cache() -> Cache:
    """Return an empty cache with spare room, for layers that keep the keys and values of all tokens."""
    return Cache(layer_class_to_replicate=GrowingLayer)


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """Cache layer whose ``keys`` and ``values``, ``[batch, heads, length, size]``, are views of longer tensors."""

    keys: torch.Tensor
    values: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate empty keys and values that have the shape of these states except for their length."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._memory = [_longer(states[:, :, :0], 0) for states in (key_states, value_states)]
        self._show(0)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens, and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.keys.shape[-2]  # transformers removes tokens by shortening the views
        end = begin + key_states.shape[-2]
        if end > self._memory[0].shape[-2]:
            self._memory = [_longer(memory[:, :, :begin], end) for memory in self._memory]
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, begin:end] = states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Remove all sequences except those at ``indices``."""
        self._memory = [memory[indices] for memory in self._memory]
        self._show(self.keys.shape[-2])

    def _show(self, length: int) -> None:
        self.keys, self.values = (memory[:, :, :length] for memory in self._memory)


def _longer(states: torch.Tensor, length: int) -> torch.Tensor:
    """Return a copy of ``states`` in memory for ``length`` tokens and some spare room."""
    batch, heads, count, size = states.shape
    memory = states.new_empty((batch, heads, length + _ROOM, size))
    memory[:, :, :count] = states
    return memory
