"""How large an adapter made of others will be, from headers alone: it follows from ranks and shapes.

Stacked factors have the ranks of all adapters together; a rank that the recipe names cuts them, and so do the sides of
a weight. Tensors that adapters bring along whole are counted as the merge of them would write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergegate.merge_core.adapters.adapter import Adapter
from mergegate.merge_core.adapters.combination import changes_of, format_of_factors, plan_of_whole
from mergegate.merge_core.checkpoint import BY_TORCH_NAME, Checkpoint
from mergegate.merge_core.recipe import Recipe

_CHANGE_BYTES = 4  # an element of a change, while it is whole


@dataclass(frozen=True)
class CombinedSize:
    """What combining adapters will take.

    Args:
        tensors: Of the result.
        parameters: Of the result, at most: a change that has a smaller rank than was asked for takes less.
        nbytes: Of its tensors, at most.
        read: Bytes of all adapters.
        files: That they lie in.
        scratch: Bytes on the disk meanwhile: changes as whole matrices, unless the result is a plain sum.
        largest: Elements of the largest change.
    """

    tensors: int
    parameters: int
    nbytes: int
    read: int
    files: int
    scratch: int
    largest: int


def combined_size(recipe: Recipe, base: Checkpoint, adapters: Mapping[str, Adapter]) -> CombinedSize:
    """The size of what ``combine_adapters`` will make of the same; no weight is read.

    Raises:
        InvalidInput: as ``combine_adapters``, as far as headers tell.
    """
    assert recipe.output is not None  # the caller's reason to be here
    parts = {ref: changes_of(ref, base, adapter, are_here=False) for ref, adapter in adapters.items()}
    # A model that the recipe names twice goes in twice.
    merged = [str(source.model) for source in recipe.modules[0].slices[0].sources if str(source.model) in parts]
    ranks: dict[str, int] = {}
    for ref in merged:
        for name, change in parts[ref][0].items():
            ranks[name] = ranks.get(name, 0) + change.a.shape[0]
    wanted, numbers = recipe.output.rank, 0
    for name, together in ranks.items():
        rows, columns = base.tensors[name].shape
        exact = recipe.output.is_sum and (wanted is None or wanted >= together)
        rank = together if exact or wanted is None else min(wanted, rows, columns)
        numbers += rank * (rows + columns)
    sides = [base.tensors[name].numel for name in ranks]
    plan = plan_of_whole(recipe, base, {ref: brought for ref, (_, brought) in parts.items()})
    whole = [job.output for job in plan.jobs] if plan else []
    stored = {id(tensor): tensor for adapter in adapters.values() for tensor in adapter.stored}
    width = BY_TORCH_NAME[str(format_of_factors(recipe)).removeprefix("torch.")].size
    return CombinedSize(
        tensors=2 * len(ranks) + len(whole),
        parameters=numbers + sum(output.numel for output in whole),
        nbytes=numbers * width + sum(output.nbytes for output in whole),
        read=sum(tensor.nbytes for tensor in stored.values()),
        files=len({tensor.file for tensor in stored.values()}),
        scratch=0 if recipe.output.is_sum else _CHANGE_BYTES * sum(sides),
        largest=max(sides, default=0),
    )
