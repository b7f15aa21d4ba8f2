"""Prompts that begin alike, as a task's examples do: the beginning is read once, whoever goes on from it.

lm-eval pads prompts on the left, each to the longest of its batch. Here the padding goes behind what they share, so
that one reading of that stands before all of them; who sees what, and at which position, stays the same::

    . . A B C x        A B C . . x
    A B C y z w   →    A B C y z w        "A B C" is read once, for both
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.evaluation.backends.token_rows import shared_beginning

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
    prompts = [row[seen.bool()].tolist() for row, seen in zip(tokens, mask, strict=True)]
    first, *others = prompts
    common = min((shared_beginning(first, other) for other in others), default=0)
    common = min(common, *(len(prompt) - 1 for prompt in prompts))
    return common if common >= _LEAST else 0


def padded_behind(tokens: torch.Tensor, mask: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same prompts and their mask, with the padding after the first ``start`` tokens."""
    moved, seen = tokens.clone(), mask.clone()
    for row, (ids, own) in enumerate(zip(tokens, mask, strict=True)):
        padding = int((own == 0).sum())
        moved[row, :start], seen[row, :start] = ids[padding : padding + start], 1
        moved[row, start : start + padding], seen[row, start : start + padding] = ids[:padding], 0
    return moved, seen


def read_once(network: Any, start: torch.Tensor, prompts: int) -> Any:
    """What a network keeps of the tokens ``start``, ``[length]``, for so many prompts that begin with them."""
    import torch

    with torch.inference_mode():
        kept = network(input_ids=start[None], use_cache=True, logits_to_keep=1).past_key_values
    kept.batch_repeat_interleave(prompts)
    return kept
