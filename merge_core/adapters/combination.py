"""Combine adapters on one base into one, by applying the recipe's method to their changes.

A task-vector method merges ``base + Δ₁`` and ``base + Δ₂`` into ``base + Δ``, and ``Δ`` is the result of the same
method for ``Δ₁`` and ``Δ₂`` over a base of zeros. So the engine merges the changes like checkpoints, and the result is
truncated to the requested rank. A plain sum needs no such merge, because stacked factors represent it exactly
(:mod:`.arithmetic`).

Full tensors of adapters (norms, biases) are merged directly and become full tensors of the result. All other changes
(DoRA, experts) are refused with the name of the tensor.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.adapters.adapter import PREFIX, Adapter, NewAdapter, task_type
from mergegate.merge_core.adapters.application import apply_adapter
from mergegate.merge_core.adapters.extraction import (
    FactoredAdapter,
    LowRankChange,
    ModuleError,
    factor_change,
    factor_sum,
    opened_files,
)
from mergegate.merge_core.adapters.names import StoredNames, split_stored
from mergegate.merge_core.adapters.tensors import AdaptedBias, AdaptedWeight, AdapterOwnTensor, read_tensor
from mergegate.merge_core.checkpoint import (
    BY_CODE,
    BY_TORCH_NAME,
    AnyTensor,
    Checkpoint,
    DerivedTensor,
    ReadElements,
    ReadStored,
    StoredTensor,
    open_checkpoint,
)
from mergegate.merge_core.engine import merge_weights
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.plan import MergePlan, TensorJob, plan_merge
from mergegate.merge_core.recipe import Recipe

if TYPE_CHECKING:
    import torch


_F32 = BY_CODE["F32"]
_EXPECTED = "in every adapter, either products of two factors or full tensors with the same names"


@dataclass(frozen=True)
class _Zeros(DerivedTensor):
    """A tensor of zeros, which replaces a base tensor when changes are merged."""

    replaced: AnyTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.replaced.parts

    def identity(self) -> Any:
        return ["zeros"]

    def open(self, read: ReadStored) -> ReadElements:
        def elements(first: int, into: Any) -> None:
            into[:] = np.uint8(0)

        return elements


def combine_adapters(
    recipe: Recipe,
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    scratch: Path,
    *,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> FactoredAdapter:
    """Execute a recipe whose ``output`` is an adapter.

    Args:
        recipe: Recipe of the kind that :mod:`merge_core.recipe.blocks` describes.
        base: Base model of all adapters.
        adapters: Adapters by ``str(ref)`` of the recipe's models.
        scratch: Temporary directory for merged changes, if the method needs them. It is removed at the end.
        seed: Seed of the random masks.
        on_progress: Called with the number of merged bytes and the total.

    Raises:
        InvalidInput: An adapter does not match the base or contains unsupported changes, or the recipe's weights do not
            add up to 1 although the method requires it.
    """
    assert recipe.output is not None  # Guaranteed by the caller.
    base = split_stored(base)
    parts = {ref: changes_of(ref, base, adapter) for ref, adapter in adapters.items()}
    changes = {ref: products for ref, (products, _) in parts.items()}
    names = [name for name in base.tensors if any(name in products for products in changes.values())]
    full_plan = plan_full_tensors(recipe, base, {ref: full_tensors for ref, (_, full_tensors) in parts.items()})
    merged_full: dict[str, torch.Tensor] = {}
    if full_plan is not None:
        with _merged_in(scratch, full_plan, seed) as (merged, read):
            merged_full = {name: read_tensor(tensor, read) for name, tensor in merged.items()}
    # The changes are merged like checkpoints over a base of zeros.
    zeros = {name: _Zeros(name, _F32, base.tensors[name].shape, base.tensors[name]) for name in names}
    tables = {str(recipe.base): replace(base, tensors=zeros)} if recipe.base else {}
    for ref, products in changes.items():
        tensors: dict[str, AnyTensor] = {
            name: replace(products[name], dtype=_F32, source=zero, round_change=False) if name in products else zero
            for name, zero in zeros.items()
        }
        tables[ref] = replace(base, tensors=tensors)
    plan = plan_merge(replace(recipe, output=None, dtype=_F32, out_dtype=None), tables)
    dtype, rank = format_of_factors(recipe), recipe.output.rank
    modules: dict[str, _Module] = {}
    for name in names:
        weight = next(products[name] for products in changes.values() if name in products)
        module, _, kind = weight.a.name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        modules[name] = _Module(module, kind == "lora_embedding_A", weight.transposed)
    if recipe.output.is_sum:
        jobs = {job.output.name: job for job in plan.jobs}
        with opened_files() as read:
            results = {name: _sum_changes(jobs[name], changes, rank, dtype, read) for name in names}
    else:
        assert rank is not None  # The recipe would have been refused.
        results = {}
        with _merged_in(scratch, plan, seed, on_progress) as (merged, read):
            for name in names:
                change = read_tensor(merged[name], read)
                results[name] = factor_change(change.T if modules[name].transposed else change, rank, dtype=dtype)
    return _result(recipe, base, adapters, {name: (modules[name], results[name]) for name in names}, merged_full)


@contextmanager
def _merged_in(
    scratch: Path, plan: MergePlan, seed: int, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[tuple[Mapping[str, AnyTensor], ReadStored]]:
    """Execute a plan in a temporary directory. Yield the merged tensors and their reader, then remove the directory."""
    shutil.rmtree(scratch, ignore_errors=True)
    merge_weights(plan, scratch, seed=seed, device="cpu", on_progress=on_progress)
    with opened_files() as read:
        yield open_checkpoint(scratch).tensors, read
    shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class _Module:
    """Name in memory of an adapted module, and the layout of its weight."""

    name: str
    is_embedding: bool
    transposed: bool


def changes_of(
    ref: str, base: Checkpoint, adapter: Adapter, *, is_local: bool = True
) -> tuple[dict[str, AdaptedWeight], dict[str, AnyTensor]]:
    """Return the weights that an adapter changes by factors, and its full tensors, both by name on disk.

    Errors name the adapter ``ref``. If ``is_local``, weights can be read: a full embedding that the adapter stores in
    addition to factors must then equal the base's embedding.

    Raises:
        InvalidInput: The adapter does not match the base, or contains changes that cannot be combined.
    """
    applied = apply_adapter(base, adapter)
    products, full_tensors = dict[str, AdaptedWeight](), dict[str, AnyTensor]()
    for name, tensor in applied.tensors.items():
        own = base.tensors.get(name)
        if tensor is own:
            continue
        if own is not None and len(own.shape) == 1 and isinstance(tensor, AdapterOwnTensor | AdaptedBias):
            full_tensors[name] = tensor
            continue
        is_product = isinstance(tensor, AdaptedWeight) and (tensor.source is own or not is_local)
        if isinstance(tensor, AdaptedWeight) and isinstance(tensor.source, AdapterOwnTensor) and own and is_local:
            # A full weight of the adapter, such as an embedding that also has factors, may equal the base's weight.
            with opened_files() as read:
                is_product = bool((read_tensor(tensor.source, read) == read_tensor(own, read)).all())
        if not isinstance(tensor, AdaptedWeight) or not is_product:
            raise InvalidInput(f"{ref}: {name}", found="the adapter replaces this tensor", expected=_EXPECTED)
        if tensor.magnitude is not None:
            raise InvalidInput(f"{ref}: {name}", found="the adapter uses DoRA", expected=_EXPECTED)
        if tensor.experts != 1 or len(tensor.shape) != 2:
            raise InvalidInput(f"{ref}: {name}", found="the adapter has factors for experts", expected=_EXPECTED)
        products[name] = tensor
    return products, full_tensors


def plan_full_tensors(
    recipe: Recipe, base: Checkpoint, full_tensors: Mapping[str, Mapping[str, AnyTensor]]
) -> MergePlan | None:
    """Return the plan for merging the adapters' full tensors, or None if no adapter has any.

    ``full_tensors`` contains them by ``str(ref)`` of the adapter and by name on disk.
    """
    names = [name for name in base.tensors if any(name in tensors for tensors in full_tensors.values())]
    if not names:
        return None
    tables = {str(recipe.base): replace(base, tensors={name: base.tensors[name] for name in names})}
    for ref, tensors in full_tensors.items():
        tables[ref] = replace(base, tensors={name: tensors.get(name, base.tensors[name]) for name in names})
    return plan_merge(replace(recipe, output=None, dtype=None, out_dtype=None), tables)


def _sum_changes(
    job: TensorJob,
    changes: Mapping[str, Mapping[str, AdaptedWeight]],
    rank: int | None,
    dtype: torch.dtype,
    read: ReadStored,
) -> LowRankChange:
    """Return ``Σ coefficient · scale · B @ A``, with the method's coefficients for this tensor."""
    import torch

    inputs = list(zip(job.inputs, job.per_input, strict=True))[1 if job.has_base else 0 :]
    weights = [float(values["weight"]) for _, values in inputs]
    total = sum(weights) if job.shared["normalize"] else 1.0
    if "lambda" not in job.shared and abs(sum(weights) / total - 1) > 1e-6:
        raise InvalidInput(
            f"{job.output.name}: weight",
            found=f"weights that add up to {sum(weights):g}, without normalize",
            expected="weights that add up to 1. Other sums scale the base as well, which an adapter cannot do",
            remedy="use task_arithmetic, or normalize: true",
        )
    scale = float(job.shared.get("lambda", 1.0)) / (total if abs(total) >= 1e-8 else 1.0)
    factors = []
    for (item, _), weight in zip(inputs, weights, strict=True):
        tensor = changes[item.model].get(job.output.name)
        if tensor is not None:
            a, b = (
                values if values.dtype == torch.float64 else values.float()
                for values in (read_tensor(factor, read) for factor in (tensor.a, tensor.b))
            )
            factors.append((weight * scale * tensor.scale, a, b))
    return factor_sum(factors, rank, dtype=dtype)


def _result(
    recipe: Recipe,
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    results: Mapping[str, tuple[_Module, LowRankChange]],
    full_tensors: Mapping[str, torch.Tensor],
) -> FactoredAdapter:
    configs = [adapter.config for adapter in adapters.values()]
    bases = dict.fromkeys(config.base for config in configs if config.base)
    tasks = dict.fromkeys(config.task for config in configs if config.task)
    # Use the base name that the adapters declare, if they agree. A local path is useless on another machine.
    base_name = next(iter(bases)) if len(bases) == 1 else recipe.modules[0].slices[0].sources[0].model.path
    if base_name.startswith(("/", "~", "file:")):
        base_name = base_name.rstrip("/").rpartition("/")[2]
    factors, embeddings = (
        {module.name: (change.a, change.b) for module, change in results.values() if module.is_embedding is kind}
        for kind in (False, True)
    )
    biases: dict[str, torch.Tensor] = {}
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    names = StoredNames(base)
    for name, tensor in full_tensors.items():
        module_name, _, leaf = names.in_memory(name).rpartition(".")
        if module_name not in factors:
            by_module.setdefault(module_name, {})[leaf] = tensor
        elif leaf == "bias":
            biases[module_name] = tensor
    adapter = NewAdapter(
        base=base_name,
        factors=factors,
        embeddings=embeddings,
        biases=biases,
        full_tensors=by_module,
        transposed=any(module.transposed for module, _ in results.values() if not module.is_embedding),
        task=next(iter(tasks)) if len(tasks) == 1 else task_type(base),
    )
    errors = tuple(ModuleError(module.name, len(change.a), change.error) for module, change in results.values())
    left_out = sum(change.left_out for _, change in results.values())
    squared = sum(change.squared for _, change in results.values())
    return FactoredAdapter(adapter, errors, math.sqrt(max(left_out, 0.0) / squared) if squared else 0.0)


def format_of_factors(recipe: Recipe) -> torch.dtype:
    """Return the format for the factors of the combined adapter: the recipe's output format, or float32."""
    import torch

    dtype = recipe.out_dtype or recipe.dtype
    return getattr(torch, dtype.torch_name) if dtype else torch.float32


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
    """Estimate the result of ``combine_adapters`` with the same arguments, without reading weights."""
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
