"""Answers written a stretch of tokens at a time: whoever is done leaves, and the others go on without them.

lm-eval writes on for a whole batch until all of it has said the same one of the strings that end an answer, or the
most tokens that an answer may have; then it cuts each answer at the first of those strings. So what leaves here has
been answered, and with it goes what every further token would have taken for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Tokens after which it is asked who is done.
_STRETCH = 32


def write_in_stretches(
    write: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    is_done: Callable[[list[int]], bool],
    kept: Any,
    context: torch.Tensor,
    mask: torch.Tensor,
    most: int,
    padding: int,
) -> torch.Tensor:
    """All prompts with their answers, ``[prompts, length]``.

    Args:
        write: Goes on from ids and mask, up to so many tokens; less where all are done. It leaves in ``kept`` all but
            the last token.
        is_done: Whether nothing that follows these tokens of an answer would count.
        kept: The cache of all but the last token of ``context``.
        context, mask: Prompts, padded on the left, ``[prompts, length]``.
        most: Tokens of a prompt with its answer.
        padding: What stands behind an answer that is shorter than others.
    """
    import torch

    prompts, begin = context.shape
    written = context.new_full((prompts, most), padding)
    going, ids, end = torch.arange(prompts, device=context.device), context, begin
    while len(going) and ids.shape[1] == end < most:
        end = min(end + _STRETCH, most)
        ids = write(ids, mask, end)
        written[going, : ids.shape[1]] = ids
        left = [place for place, row in enumerate(ids[:, begin:].tolist()) if not is_done(row)]
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        if len(left) < len(going):
            kept.batch_select_indices(at := torch.tensor(left, dtype=torch.long, device=context.device))
            going, ids, mask = going[at], ids[at], mask[at]
    return written[:, : ids.shape[1]]
