"""Compute the key-value cache of a batch of prompts, with the shared prefix computed once and without padding.

lm-eval pads prompts on the left to the longest of the batch and processes them together. This module packs them into
rows (:mod:`.token_rows`) after their shared prefix, and copies the resulting keys and values to the positions that they
would have with padding. Attention and position ids are unchanged::

    . . A B C x        A B C              "A B C" is computed once, for both
    A B C y z w   →          y z          one row after it; x and w are computed with the first generated token
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mergegate.tasks.evaluation.backends.key_value_cache import growing_cache
from mergegate.tasks.evaluation.backends.token_rows import row_inputs, shared_beginning, token_rows

if TYPE_CHECKING:
    import torch

# With fewer shared tokens, or a single prompt, two forward passes take longer than one.
_LEAST = 16


def common_start(tokens: torch.Tensor, mask: torch.Tensor) -> int:
    """Return the number of tokens that all prompts of a batch share, or 0 if it is too small to be useful.

    At least one token of each prompt is not counted.

    Args:
        tokens: Token ids, padded on the left, ``[prompts, length]``.
        mask: 1 for tokens of the prompt, 0 for padding, ``[prompts, length]``.
    """
    first, *others = _without_padding(tokens, mask)
    common = min((shared_beginning(first, other) for other in others), default=0)
    common = min(common, *(len(prompt) - 1 for prompt in (first, *others)))
    return common if common >= _LEAST else 0


def cache_prompts(network: Any, tokens: torch.Tensor, mask: torch.Tensor, row_tokens: int) -> Any:
    """Return the key-value cache of all tokens of the prompts but the last of each, with room for generated tokens.

    Args:
        network: Network of transformers.
        tokens, mask: See ``common_start``.
        row_tokens: Number of tokens in a row, unless a single prompt is longer.

    Returns:
        A cache of ``length - 1`` tokens with zeros at padded positions.
    """
    import torch

    prompts = _without_padding(tokens, mask)
    start = common_start(tokens, mask)
    cache = growing_cache()

    def copy_states(number: int, row_cache: Any, indices: slice | torch.Tensor, offset: int) -> None:
        """Copy the states at ``indices`` of a row to a prompt, after the first ``offset`` tokens of the prompt."""
        if not cache.layers:
            _fill(cache, row_cache, len(prompts), tokens.shape[1] - 1)
        at = tokens.shape[1] - len(prompts[number]) + offset
        for layer, row_layer in zip(cache.layers, row_cache.layers, strict=True):
            for target, states in ((layer.keys, row_layer.keys), (layer.values, row_layer.values)):
                selected = states[0, :, indices]
                target[number, :, at : at + selected.shape[1]] = selected

    with torch.no_grad():
        prefix_cache = growing_cache()
        if start:
            prefix_cache = read_once(network, torch.tensor(prompts[0][:start], device=tokens.device))
            for number in range(len(prompts)):
                copy_states(number, prefix_cache, slice(0, start), 0)
        longer = [number for number, prompt in enumerate(prompts) if len(prompt) > start + 1]
        for row in token_rows([prompts[number][start:-1] for number in longer], row_tokens):
            network(**row_inputs(network, row, start), past_key_values=prefix_cache, use_cache=True, logits_to_keep=1)
            for number, path in zip(row.sequences, row.paths, strict=True):
                copy_states(longer[number], prefix_cache, torch.from_numpy(path + start).to(tokens.device), start)
            prefix_cache.crop(-len(row.tokens))
    return cache


def read_once(network: Any, start: torch.Tensor) -> Any:
    """Return the key-value cache of a single sequence with the tokens ``start``, ``[length]``."""
    import torch

    cache = growing_cache()
    with torch.no_grad():
        network(input_ids=start[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _without_padding(tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[seen.bool()].tolist() for row, seen in zip(tokens, mask, strict=True)]


def _fill(cache: Any, like: Any, prompts: int, length: int) -> None:
    """Fill a cache with zeros for a number of prompts and a length, with layers like those of another cache."""
    for number, layer in enumerate(like.layers):
        shapes = ((prompts, states.shape[1], length, states.shape[3]) for states in (layer.keys, layer.values))
        cache.update(*(layer.keys.new_zeros(shape) for shape in shapes), number)
