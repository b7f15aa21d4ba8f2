"""Generate the answers of a batch in steps of a few tokens, and remove finished answers between steps.

lm-eval generates until every answer in the batch contains the same stop string or reaches the token limit, and then
truncates each answer at the first stop string. Removing an answer that contains any stop string therefore does not
change it, and saves the work for all further tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Number of tokens between two checks for finished answers.
_STEP = 32


def generate_in_steps(
    write: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    is_done: Callable[[list[int]], bool],
    cache: Any,
    context: torch.Tensor,
    mask: torch.Tensor,
    most: int,
    padding: int,
) -> torch.Tensor:
    """Return all prompts with their answers, ``[prompts, length]``.

    Args:
        write: Continues token ids and their mask up to a length, or to a shorter one if all answers are finished. It
            leaves all tokens but the last in ``cache``.
        is_done: Returns whether an answer with these tokens is finished.
        cache: Key-value cache of all tokens in ``context`` but the last.
        context, mask: Prompts, padded on the left, ``[prompts, length]``.
        most: Largest number of tokens in a prompt with its answer.
        padding: Token that follows an answer that is shorter than others.
    """
    import torch

    prompts, begin = context.shape
    written = context.new_full((prompts, most), padding)
    going, ids, end = torch.arange(prompts, device=context.device), context, begin
    while len(going) and ids.shape[1] == end < most:
        end = min(end + _STEP, most)
        ids = write(ids, mask, end)
        written[going, : ids.shape[1]] = ids
        left = [index for index, row in enumerate(ids[:, begin:].tolist()) if not is_done(row)]
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        if len(left) < len(going):
            cache.batch_select_indices(at := torch.tensor(left, dtype=torch.long, device=context.device))
            going, ids, mask = going[at], ids[at], mask[at]
    return written[:, : ids.shape[1]]
