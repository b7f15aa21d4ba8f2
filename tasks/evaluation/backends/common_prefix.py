"""Prompts read before anything is written after them: what all begin with once, the rest without padding.

lm-eval pads prompts on the left, each to the longest of its batch, and reads them together. Here they are laid into
rows (:mod:`.token_rows`) behind what they share, and what the network keeps of each is put where it would have stood;
who sees what, and at which position, stays the same::

    . . A B C x        A B C              "A B C" is read once, for both
    A B C y z w   →          y z          a row behind it; x and w are read when the first token is written
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mergegate.tasks.evaluation.backends.key_value_cache import growing_cache
from mergegate.tasks.evaluation.backends.token_rows import row_inputs, shared_beginning, token_rows

if TYPE_CHECKING:
    import torch

# Below so many tokens, or for a single prompt, two readings take longer than one.
_LEAST = 16


def common_start(tokens: torch.Tensor, mask: torch.Tensor) -> int:
    """How many tokens all prompts of a batch begin with, so that each has one left; 0 where it is not worth it.

    Args:
        tokens: Ids, padded on the left, ``[prompts, length]``.
        mask: 1 where a token is one of the prompt, ``[prompts, length]``.
    """
    first, *others = _without_padding(tokens, mask)
    common = min((shared_beginning(first, other) for other in others), default=0)
    common = min(common, *(len(prompt) - 1 for prompt in (first, *others)))
    return common if common >= _LEAST else 0


def read_apart(network: Any, tokens: torch.Tensor, mask: torch.Tensor, row_tokens: int) -> Any:
    """What a network keeps of prompts but for the last token of each, with room for what is written after them.

    Args:
        tokens, mask: As of ``common_start``.
        row_tokens: Tokens of a row, where a single prompt is not longer.

    Returns:
        A cache of ``length - 1`` tokens; zeros where a prompt has its padding.
    """
    import torch

    prompts = _without_padding(tokens, mask)
    start = common_start(tokens, mask)
    kept = growing_cache()

    def keep(number: int, of_row: Any, places: slice | torch.Tensor, known: int) -> None:
        """Of one prompt what stands at ``places`` of a row, behind the tokens ``known`` of it."""
        if not kept.layers:
            _fill(kept, of_row, len(prompts), tokens.shape[1] - 1)
        at = tokens.shape[1] - len(prompts[number]) + known
        for layer, found in zip(kept.layers, of_row.layers, strict=True):
            for all_states, states in ((layer.keys, found.keys), (layer.values, found.values)):
                of_it = states[0, :, places]
                all_states[number, :, at : at + of_it.shape[1]] = of_it

    with torch.no_grad():
        begun = growing_cache()
        if start:
            begun = read_once(network, torch.tensor(prompts[0][:start], device=tokens.device))
            for number in range(len(prompts)):
                keep(number, begun, slice(0, start), 0)
        longer = [number for number, prompt in enumerate(prompts) if len(prompt) > start + 1]
        for row in token_rows([prompts[number][start:-1] for number in longer], row_tokens):
            network(**row_inputs(network, row, start), past_key_values=begun, use_cache=True, logits_to_keep=1)
            for number, path in zip(row.sequences, row.paths, strict=True):
                keep(longer[number], begun, torch.from_numpy(path + start).to(tokens.device), start)
            begun.crop(-len(row.tokens))
    return kept


def read_once(network: Any, start: torch.Tensor) -> Any:
    """A cache of one sequence, the tokens ``start``, ``[length]``."""
    import torch

    kept = growing_cache()
    with torch.no_grad():
        network(input_ids=start[None], past_key_values=kept, use_cache=True, logits_to_keep=1)
    return kept


def _without_padding(tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[seen.bool()].tolist() for row, seen in zip(tokens, mask, strict=True)]


def _fill(kept: Any, like: Any, prompts: int, length: int) -> None:
    """Zeros for so many prompts of such a length, in layers like those of another cache."""
    for number, layer in enumerate(like.layers):
        shapes = ((prompts, states.shape[1], length, states.shape[3]) for states in (layer.keys, layer.values))
        kept.update(*(layer.keys.new_zeros(shape) for shape in shapes), number)
