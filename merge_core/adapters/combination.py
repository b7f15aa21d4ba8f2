"""Combine adapters on one base into one adapter, by applying the recipe's method to their changes.

A task-vector method merges ``base + Δ₁`` and ``base + Δ₂`` into ``base + Δ``, and ``Δ`` is the result of the same
method for ``Δ₁`` and ``Δ₂`` over a base of zeros. So the engine merges the products in the usual streaming way, with
its masks and thresholds, and the result is truncated to the requested rank. A plain sum of products is never
multiplied out, because stacked factors represent it exactly (:mod:`.factorization`).

Full tensors of adapters (norms, biases) are merged directly and become full tensors of the result. Changes that are
neither full tensors nor products of two factors (DoRA, experts) are refused with the name of the tensor.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.adapters.adapter import PREFIX, Adapter
from mergegate.merge_core.adapters.application import apply_adapter
from mergegate.merge_core.adapters.arithmetic import elements_of, read_whole
from mergegate.merge_core.adapters.extraction import ModuleError, opened_files
from mergegate.merge_core.adapters.factorization import LowRankChange, factor_change, factor_sum
from mergegate.merge_core.adapters.names import memory_name
from mergegate.merge_core.adapters.output import NewAdapter
from mergegate.merge_core.adapters.tensors import AdaptedBias, AdaptedWeight, AdapterOwnTensor
from mergegate.merge_core.checkpoint import (
    BY_CODE,
    AnyTensor,
    Checkpoint,
    DerivedTensor,
    ReadElements,
    ReadStored,
    StoredTensor,
)
from mergegate.merge_core.checkpoint import open_checkpoint as open_merged
from mergegate.merge_core.engine import merge_weights
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.plan import MergePlan, TensorJob, plan_merge
from mergegate.merge_core.recipe import Recipe

if TYPE_CHECKING:
    import torch

_F32 = BY_CODE["F32"]
_EXPECTED = "products of two factors in every adapter, or the same tensors brought along whole"


@dataclass(frozen=True)
class Combined:
    """A combined adapter that is not yet written.

    Args:
        adapter: The adapter.
        errors: Error of the truncation to the rank, for each module.
        error: Relative error of all changes together.
    """

    adapter: NewAdapter
    errors: tuple[ModuleError, ...]
    error: float


@dataclass(frozen=True)
class _Zeros(DerivedTensor):
    """A tensor of zeros, which replaces a base tensor when changes are merged."""

    place: AnyTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.place.parts

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
) -> Combined:
    """Execute a recipe whose ``output`` is an adapter.

    Args:
        recipe: See :mod:`merge_core.recipe.adapter_output`.
        base: Base model of all adapters.
        adapters: Adapters by ``str(ref)`` of the recipe's models.
        scratch: Temporary directory for merged changes, if the method needs them. It is removed at the end.
        seed: Seed of the random masks.
        on_progress: Called with the number of bytes done and the total.

    Raises:
        InvalidInput: An adapter does not match the base or contains unsupported changes, or the weights do not add up
            to 1 although the method requires it.
    """
    assert recipe.output is not None  # Guaranteed by the caller.
    parts = {ref: changes_of(ref, base, adapter) for ref, adapter in adapters.items()}
    changes = {ref: products for ref, (products, _) in parts.items()}
    names = [name for name in base.tensors if any(name in products for products in changes.values())]
    full_tensors = {ref: full for ref, (_, full) in parts.items()}
    merged_full = _merge_full_tensors(recipe, base, full_tensors, scratch, seed)
    modules = _modules(names, changes)
    tables = _tables(recipe, base, names, changes)
    plan = plan_merge(replace(recipe, output=None, dtype=_F32, out_dtype=None), tables)
    dtype = format_of_factors(recipe)
    if recipe.output.is_sum:
        jobs = {job.output.name: job for job in plan.jobs}
        with opened_files() as read:
            results = {name: _sum_changes(jobs[name], changes, recipe.output.rank, dtype, read) for name in names}
    else:
        assert recipe.output.rank is not None  # The recipe would have been refused.
        shutil.rmtree(scratch, ignore_errors=True)
        merge_weights(plan, scratch, seed=seed, device="cpu", on_progress=on_progress)
        merged = open_merged(scratch)
        with opened_files() as read:
            results = {
                name: _truncate(merged.tensors[name], modules[name], recipe.output.rank, dtype, read) for name in names
            }
        shutil.rmtree(scratch, ignore_errors=True)
    return _result(recipe, base, adapters, names, modules, results, merged_full)


@dataclass(frozen=True)
class _Module:
    """An adapted module: its name in memory, and the layout of its weight."""

    name: str
    is_embedding: bool
    transposed: bool


def require_products(ref: str, base: Checkpoint, adapter: Adapter) -> None:
    """Check from headers that an adapter can be combined with others.

    Raises:
        InvalidInput: The adapter does not match the base, or contains changes that cannot be combined.
    """
    changes_of(ref, base, adapter, is_local=False)


def changes_of(
    ref: str, base: Checkpoint, adapter: Adapter, *, is_local: bool = True
) -> tuple[dict[str, AdaptedWeight], dict[str, AnyTensor]]:
    """Return the changed weights and the full tensors of an adapter, by name on disk.

    Args:
        ref: Reference of the adapter, for messages.
        base: Base model of the adapter.
        adapter: The adapter.
        is_local: Whether the weights can be read. If so, an embedding that is stored in addition to its factors must
            equal the embedding of the base.

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
        if not isinstance(tensor, AdaptedWeight) or not (
            tensor.source is own or not is_local or _is_copy(tensor.source, own)
        ):
            raise InvalidInput(f"{ref}: {name}", found="it is replaced, not added to", expected=_EXPECTED)
        if tensor.magnitude is not None:
            raise InvalidInput(f"{ref}: {name}", found="DoRA", expected=_EXPECTED)
        if tensor.experts != 1 or len(tensor.shape) != 2:
            raise InvalidInput(f"{ref}: {name}", found="factors of experts", expected=_EXPECTED)
        products[name] = tensor
    return products, full_tensors


def _merge_full_tensors(
    recipe: Recipe,
    base: Checkpoint,
    full_tensors: Mapping[str, Mapping[str, AnyTensor]],
    scratch: Path,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Return the merge of the adapters' full tensors, by name on disk."""
    plan = plan_full_tensors(recipe, base, full_tensors)
    if plan is None:
        return {}
    shutil.rmtree(scratch, ignore_errors=True)
    merge_weights(plan, scratch, seed=seed, device="cpu")
    merged = open_merged(scratch)
    with opened_files() as read:
        results = {
            name: read_whole(tensor, elements_of(tensor, read)).view(tensor.shape)
            for name, tensor in merged.tensors.items()
        }
    shutil.rmtree(scratch, ignore_errors=True)
    return results


def plan_full_tensors(
    recipe: Recipe, base: Checkpoint, full_tensors: Mapping[str, Mapping[str, AnyTensor]]
) -> MergePlan | None:
    """Return the plan for merging the adapters' full tensors, or None if no adapter has any.

    Args:
        recipe: Recipe that combines the adapters.
        base: Base model of the adapters.
        full_tensors: Full tensors by ``str(ref)`` of the adapter and by name on disk.
    """
    names = [name for name in base.tensors if any(name in tensors for tensors in full_tensors.values())]
    if not names:
        return None
    tables = {str(recipe.base): replace(base, tensors={name: base.tensors[name] for name in names})}
    for ref, tensors in full_tensors.items():
        tables[ref] = replace(base, tensors={name: tensors.get(name, base.tensors[name]) for name in names})
    return plan_merge(replace(recipe, output=None, dtype=None, out_dtype=None), tables)


def _is_copy(source: AnyTensor, own: AnyTensor | None) -> bool:
    """Return whether a full weight of an adapter (an embedding that also has factors) equals the base's weight."""
    if own is None or not isinstance(source, AdapterOwnTensor):
        return False
    with opened_files() as read:
        values, base_values = (read_whole(tensor, elements_of(tensor, read)) for tensor in (source, own))
    return bool((values == base_values).all())


def _modules(names: list[str], changes: Mapping[str, Mapping[str, AdaptedWeight]]) -> dict[str, _Module]:
    modules = {}
    for name in names:
        tensor = next(products[name] for products in changes.values() if name in products)
        is_embedding = tensor.a.name.endswith(".lora_embedding_A")
        module = tensor.a.name.removeprefix(PREFIX).removesuffix(".lora_embedding_A").removesuffix(".lora_A.weight")
        modules[name] = _Module(module, is_embedding, tensor.transposed)
    return modules


def _tables(
    recipe: Recipe, base: Checkpoint, names: list[str], changes: Mapping[str, Mapping[str, AdaptedWeight]]
) -> dict[str, Checkpoint]:
    """Return the changes as checkpoints over a base of zeros."""
    zeros = {name: _Zeros(name, _F32, base.tensors[name].shape, base.tensors[name]) for name in names}
    tables = {str(recipe.base): replace(base, tensors=zeros)} if recipe.base else {}
    for ref, products in changes.items():
        tensors: dict[str, AnyTensor] = {
            name: replace(products[name], dtype=_F32, source=zero, round_change=False) if name in products else zero
            for name, zero in zeros.items()
        }
        tables[ref] = replace(base, tensors=tensors)
    return tables


def _sum_changes(
    job: TensorJob,
    changes: Mapping[str, Mapping[str, AdaptedWeight]],
    rank: int | None,
    dtype: torch.dtype,
    read: ReadStored,
) -> LowRankChange:
    """Return ``Σ coefficient · scale · B @ A``, with the method's coefficients for this tensor."""
    inputs = list(zip(job.inputs, job.per_input, strict=True))[1 if job.has_base else 0 :]
    weights = [float(values["weight"]) for _, values in inputs]
    total = sum(weights) if job.shared["normalize"] else 1.0
    if "lambda" not in job.shared and abs(sum(weights) / total - 1) > 1e-6:
        raise InvalidInput(
            f"{job.output.name}: weight",
            found=f"weights that add up to {sum(weights):g}, without normalize",
            expected="an average: otherwise the base is scaled as well, which no adapter can",
            remedy="use task_arithmetic, or normalize: true",
        )
    scale = float(job.shared.get("lambda", 1.0)) / (total if abs(total) >= 1e-8 else 1.0)
    factors = []
    for (item, _), weight in zip(inputs, weights, strict=True):
        tensor = changes[item.model].get(job.output.name)
        if tensor is not None:
            a, b = (_matrix(factor, read) for factor in (tensor.a, tensor.b))
            factors.append((weight * scale * tensor.scale, a, b))
    return factor_sum(factors, rank, dtype=dtype)


def _matrix(tensor: StoredTensor, read: ReadStored) -> torch.Tensor:
    values = read_whole(tensor, lambda first, into: read(tensor, first, into)).view(tensor.shape)
    return values if tensor.dtype.code == "F64" else values.float()


def _truncate(tensor: AnyTensor, module: _Module, rank: int, dtype: torch.dtype, read: ReadStored) -> LowRankChange:
    change = read_whole(tensor, lambda first, into: read(tensor.parts[0], first, into)).view(tensor.shape)
    return factor_change(change.T if module.transposed else change, rank, dtype=dtype)


def _biases(base: Checkpoint, full_tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the biases among full tensors, by module in memory."""
    by_name = {memory_name(name, base): tensor for name, tensor in full_tensors.items()}
    return {name.removesuffix(".bias"): tensor for name, tensor in by_name.items() if name.endswith(".bias")}


def _tensors_without_factors(
    base: Checkpoint, full_tensors: Mapping[str, torch.Tensor], factors: Mapping[str, object]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the full tensors of modules without factors, by module and last name part."""
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in full_tensors.items():
        module, _, leaf = memory_name(name, base).rpartition(".")
        if module not in factors:
            by_module.setdefault(module, {})[leaf] = tensor
    return by_module


def _result(
    recipe: Recipe,
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    names: list[str],
    modules: Mapping[str, _Module],
    results: Mapping[str, LowRankChange],
    full_tensors: Mapping[str, torch.Tensor],
) -> Combined:
    configs = [adapter.config for adapter in adapters.values()]
    bases = dict.fromkeys(config.base for config in configs if config.base)
    tasks = dict.fromkeys(config.task for config in configs if config.task)
    pairs = {name: (results[name].a, results[name].b) for name in names}
    factors = {modules[name].name: pairs[name] for name in names if not modules[name].is_embedding}
    embeddings = {modules[name].name: pairs[name] for name in names if modules[name].is_embedding}
    first = recipe.modules[0].slices[0].sources[0].model
    # Use the base name that the adapters declare, if they agree. A local path is useless on another machine.
    base_name = next(iter(bases)) if len(bases) == 1 else first.path
    if base_name.startswith(("/", "~", "file:")):
        base_name = base_name.rstrip("/").rpartition("/")[2]
    adapter = NewAdapter(
        base=base_name,
        factors=factors,
        embeddings=embeddings,
        biases={module: bias for module, bias in _biases(base, full_tensors).items() if module in factors},
        whole=_tensors_without_factors(base, full_tensors, factors),
        transposed=any(modules[name].transposed for name in names if not modules[name].is_embedding),
        task=next(iter(tasks)) if len(tasks) == 1 else "CAUSAL_LM",
    )
    errors = tuple(ModuleError(modules[name].name, len(results[name].a), results[name].error) for name in names)
    left_out, squared = (sum(getattr(change, key) for change in results.values()) for key in ("left_out", "squared"))
    return Combined(adapter, errors, math.sqrt(max(left_out, 0.0) / squared) if squared else 0.0)


def format_of_factors(recipe: Recipe) -> torch.dtype:
    """Return the format of the factors: that of the recipe, or float32."""
    import torch

    dtype = recipe.out_dtype or recipe.dtype
    return getattr(torch, dtype.torch_name) if dtype else torch.float32
