"""Estimate the size of a combined adapter from headers.

The size follows from ranks and shapes. The rank of an exact sum of changes is the sum of the adapters' ranks. All other
ranks are limited by the recipe and by the dimensions of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergegate.merge_core.adapters.adapter import Adapter
from mergegate.merge_core.adapters.combination import changes_of, format_of_factors, plan_full_tensors
from mergegate.merge_core.checkpoint import BY_TORCH_NAME, Checkpoint
from mergegate.merge_core.recipe import Recipe

_CHANGE_BYTES = 4  # Bytes per element of a change that is stored as a full matrix.


@dataclass(frozen=True)
class CombinedSize:
    """Estimated size of a combined adapter, and cost of combining it.

    Args:
        tensors: Number of tensors in the combined adapter.
        parameters: Maximum number of parameters in the combined adapter. Changes of a smaller rank need fewer.
        nbytes: Maximum size of the combined adapter's tensors in bytes.
        read: Size of all input adapters in bytes.
        files: Number of files of the input adapters.
        scratch: Temporary disk space for changes as full matrices, in bytes. 0 for a plain sum.
        largest: Number of elements of the largest change.
    """

    tensors: int
    parameters: int
    nbytes: int
    read: int
    files: int
    scratch: int
    largest: int


def combined_size(recipe: Recipe, base: Checkpoint, adapters: Mapping[str, Adapter]) -> CombinedSize:
    """Estimate the result of ``combine_adapters`` with the same arguments, without reading weights.

    Raises:
        InvalidInput: The headers show that ``combine_adapters`` would fail.
    """
    assert recipe.output is not None  # Guaranteed by the caller.
    parts = {ref: changes_of(ref, base, adapter, is_local=False) for ref, adapter in adapters.items()}
    # A model that the recipe lists twice counts twice.
    merged = [str(source.model) for source in recipe.modules[0].slices[0].sources if str(source.model) in parts]
    ranks: dict[str, int] = {}
    for ref in merged:
        for name, change in parts[ref][0].items():
            ranks[name] = ranks.get(name, 0) + change.a.shape[0]
    max_rank, numbers = recipe.output.rank, 0
    for name, total_rank in ranks.items():
        rows, columns = base.tensors[name].shape
        exact = recipe.output.is_sum and (max_rank is None or max_rank >= total_rank)
        rank = total_rank if exact or max_rank is None else min(max_rank, rows, columns)
        numbers += rank * (rows + columns)
    element_counts = [base.tensors[name].numel for name in ranks]
    plan = plan_full_tensors(recipe, base, {ref: full_tensors for ref, (_, full_tensors) in parts.items()})
    outputs = [job.output for job in plan.jobs] if plan else []
    stored = {id(tensor): tensor for adapter in adapters.values() for tensor in adapter.stored_tensors}
    width = BY_TORCH_NAME[str(format_of_factors(recipe)).removeprefix("torch.")].size
    return CombinedSize(
        tensors=2 * len(ranks) + len(outputs),
        parameters=numbers + sum(output.numel for output in outputs),
        nbytes=numbers * width + sum(output.nbytes for output in outputs),
        read=sum(tensor.nbytes for tensor in stored.values()),
        files=len({tensor.file for tensor in stored.values()}),
        scratch=0 if recipe.output.is_sum else _CHANGE_BYTES * sum(element_counts),
        largest=max(element_counts, default=0),
    )
