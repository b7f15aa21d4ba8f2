"""Adapters on one base become one adapter: by the recipe's own method, on the changes that they make.

A merge of ``base + Δ₁`` and ``base + Δ₂`` by a method of differences is ``base + Δ``; ``Δ`` is what the same method
makes of ``Δ₁`` and ``Δ₂`` over a base of zeros. So the engine merges the products, streamed as ever, with its masks and
thresholds, and the result is cut to the wanted rank. A plain sum of products is never multiplied out: stacked factors
are the sum itself (:mod:`.factoring`).

Tensors that adapters bring along whole (norms, biases) are merged as they are, and brought along whole again. What is
neither that nor a product of two factors (DoRA, experts) is refused by its name.
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
    """An adapter made of others, not yet written.

    Args:
        adapter: The adapter.
        errors: What the rank leaves out of the change of each module.
        error: Of all changes together.
    """

    adapter: NewAdapter
    errors: tuple[ModuleError, ...]
    error: float


@dataclass(frozen=True)
class _Zeros(DerivedTensor):
    """The base, as a method of differences sees it."""

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
    """Carry out a recipe whose ``output`` is an adapter.

    Args:
        recipe: See :mod:`merge_core.recipe.adapter_output`.
        base: The model that all adapters are for.
        adapters: By ``str(ref)`` of the recipe's models.
        scratch: A directory for merged changes, where the method needs them; removed at the end.
        seed: Of the random masks.
        on_progress: Called with bytes done and in all.

    Raises:
        InvalidInput: Adapters that do not fit the base, or hold more than factors; weights that are no average.
    """
    assert recipe.output is not None  # the caller's reason to be here
    parts = {ref: changes_of(ref, base, adapter) for ref, adapter in adapters.items()}
    changes = {ref: products for ref, (products, _) in parts.items()}
    names = [name for name in base.tensors if any(name in of_one for of_one in changes.values())]
    whole = _merged_whole(recipe, base, {ref: brought for ref, (_, brought) in parts.items()}, scratch, seed)
    modules = _modules(names, changes)
    tables = _tables(recipe, base, names, changes)
    plan = plan_merge(replace(recipe, output=None, dtype=_F32, out_dtype=None), tables)
    kept_as = format_of_factors(recipe)
    if recipe.output.is_sum:
        jobs = {job.output.name: job for job in plan.jobs}
        with opened_files() as read:
            found = {name: _summed(jobs[name], changes, recipe.output.rank, kept_as, read) for name in names}
    else:
        assert recipe.output.rank is not None  # or it had been refused
        shutil.rmtree(scratch, ignore_errors=True)
        merge_weights(plan, scratch, seed=seed, device="cpu", on_progress=on_progress)
        merged = open_merged(scratch)
        with opened_files() as read:
            found = {
                name: _cut(merged.tensors[name], modules[name], recipe.output.rank, kept_as, read) for name in names
            }
        shutil.rmtree(scratch, ignore_errors=True)
    return _result(recipe, base, adapters, names, modules, found, whole)


@dataclass(frozen=True)
class _Module:
    """A module that is adapted: its name in memory, and how its weight is stored."""

    name: str
    is_embedding: bool
    transposed: bool


def require_products(ref: str, base: Checkpoint, adapter: Adapter) -> None:
    """See from headers that an adapter can be combined with others.

    Raises:
        InvalidInput: It does not fit the base, or holds more than products of two factors.
    """
    changes_of(ref, base, adapter, are_here=False)


def changes_of(
    ref: str, base: Checkpoint, adapter: Adapter, *, are_here: bool = True
) -> tuple[dict[str, AdaptedWeight], dict[str, AnyTensor]]:
    """What an adapter adds to, and what it brings along whole, by name on disk.

    Args:
        are_here: Whether weights may be read: an embedding may lie beside its factors, if it is the base's own.
    """
    applied = apply_adapter(base, adapter)
    products, brought = dict[str, AdaptedWeight](), dict[str, AnyTensor]()
    for name, tensor in applied.tensors.items():
        own = base.tensors.get(name)
        if tensor is own:
            continue
        if own is not None and len(own.shape) == 1 and isinstance(tensor, AdapterOwnTensor | AdaptedBias):
            brought[name] = tensor
            continue
        if not isinstance(tensor, AdaptedWeight) or not (
            tensor.source is own or not are_here or _is_copy(tensor.source, own)
        ):
            raise InvalidInput(f"{ref}: {name}", found="it is replaced, not added to", expected=_EXPECTED)
        if tensor.magnitude is not None:
            raise InvalidInput(f"{ref}: {name}", found="DoRA", expected=_EXPECTED)
        if tensor.experts != 1 or len(tensor.shape) != 2:
            raise InvalidInput(f"{ref}: {name}", found="factors of experts", expected=_EXPECTED)
        products[name] = tensor
    return products, brought


def _merged_whole(
    recipe: Recipe,
    base: Checkpoint,
    brought: Mapping[str, Mapping[str, AnyTensor]],
    scratch: Path,
    seed: int,
) -> dict[str, torch.Tensor]:
    """What the recipe makes of the tensors that adapters bring along whole, by name on disk."""
    plan = plan_of_whole(recipe, base, brought)
    if plan is None:
        return {}
    shutil.rmtree(scratch, ignore_errors=True)
    merge_weights(plan, scratch, seed=seed, device="cpu")
    merged = open_merged(scratch)
    with opened_files() as read:
        found = {name: read_whole(one, elements_of(one, read)).view(one.shape) for name, one in merged.tensors.items()}
    shutil.rmtree(scratch, ignore_errors=True)
    return found


def plan_of_whole(recipe: Recipe, base: Checkpoint, brought: Mapping[str, Mapping[str, AnyTensor]]) -> MergePlan | None:
    """How tensors that adapters bring along whole are merged; None where there are none.

    Args:
        brought: By ``str(ref)`` and name on disk.
    """
    names = [name for name in base.tensors if any(name in of_one for of_one in brought.values())]
    if not names:
        return None
    tables = {str(recipe.base): replace(base, tensors={name: base.tensors[name] for name in names})}
    for ref, of_one in brought.items():
        tables[ref] = replace(base, tensors={name: of_one.get(name, base.tensors[name]) for name in names})
    return plan_merge(replace(recipe, output=None, dtype=None, out_dtype=None), tables)


def _is_copy(source: AnyTensor, own: AnyTensor | None) -> bool:
    """Whether a weight that an adapter brings along (an embedding, beside its factors) is the base's own."""
    if own is None or not isinstance(source, AdapterOwnTensor):
        return False
    with opened_files() as read:
        brought, before = (read_whole(one, elements_of(one, read)) for one in (source, own))
    return bool((brought == before).all())


def _modules(names: list[str], changes: Mapping[str, Mapping[str, AdaptedWeight]]) -> dict[str, _Module]:
    found = {}
    for name in names:
        tensor = next(of_one[name] for of_one in changes.values() if name in of_one)
        is_embedding = tensor.a.name.endswith(".lora_embedding_A")
        module = tensor.a.name.removeprefix(PREFIX).removesuffix(".lora_embedding_A").removesuffix(".lora_A.weight")
        found[name] = _Module(module, is_embedding, tensor.transposed)
    return found


def _tables(
    recipe: Recipe, base: Checkpoint, names: list[str], changes: Mapping[str, Mapping[str, AdaptedWeight]]
) -> dict[str, Checkpoint]:
    """The changes as checkpoints over a base of zeros."""
    zeros = {name: _Zeros(name, _F32, base.tensors[name].shape, base.tensors[name]) for name in names}
    tables = {str(recipe.base): replace(base, tensors=zeros)} if recipe.base else {}
    for ref, of_one in changes.items():
        inside: dict[str, AnyTensor] = {
            name: replace(of_one[name], dtype=_F32, source=zero, round_change=False) if name in of_one else zero
            for name, zero in zeros.items()
        }
        tables[ref] = replace(base, tensors=inside)
    return tables


def _summed(
    job: TensorJob,
    changes: Mapping[str, Mapping[str, AdaptedWeight]],
    rank: int | None,
    kept_as: torch.dtype,
    read: ReadStored,
) -> LowRankChange:
    """``Σ coefficient · scale · B @ A``, with the coefficients that the method has for this tensor."""
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
            a, b = (_matrix(one, read) for one in (tensor.a, tensor.b))
            factors.append((weight * scale * tensor.scale, a, b))
    return factor_sum(factors, rank, kept_as=kept_as)


def _matrix(tensor: StoredTensor, read: ReadStored) -> torch.Tensor:
    values = read_whole(tensor, lambda first, into: read(tensor, first, into)).view(tensor.shape)
    return values if tensor.dtype.code == "F64" else values.float()


def _cut(tensor: AnyTensor, module: _Module, rank: int, kept_as: torch.dtype, read: ReadStored) -> LowRankChange:
    change = read_whole(tensor, lambda first, into: read(tensor.parts[0], first, into)).view(tensor.shape)
    return factor_change(change.T if module.transposed else change, rank, kept_as=kept_as)


def _biases(base: Checkpoint, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Biases among what is brought along, by module in memory."""
    named = {memory_name(name, base): tensor for name, tensor in whole.items()}
    return {name.removesuffix(".bias"): tensor for name, tensor in named.items() if name.endswith(".bias")}


def _saved(
    base: Checkpoint, whole: Mapping[str, torch.Tensor], factors: Mapping[str, object]
) -> dict[str, dict[str, torch.Tensor]]:
    """What is brought along of modules without factors."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in whole.items():
        module, _, leaf = memory_name(name, base).rpartition(".")
        if module not in factors:
            found.setdefault(module, {})[leaf] = tensor
    return found


def _result(
    recipe: Recipe,
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    names: list[str],
    modules: Mapping[str, _Module],
    found: Mapping[str, LowRankChange],
    whole: Mapping[str, torch.Tensor],
) -> Combined:
    configs = [adapter.config for adapter in adapters.values()]
    bases = dict.fromkeys(config.base for config in configs if config.base)
    tasks = dict.fromkeys(config.task for config in configs if config.task)
    factors = {modules[name].name: (found[name].a, found[name].b) for name in names if not modules[name].is_embedding}
    tables = {modules[name].name: (found[name].a, found[name].b) for name in names if modules[name].is_embedding}
    first = recipe.modules[0].slices[0].sources[0].model
    # The adapters' own name of the base, if they agree on one. A local path means nothing on another machine.
    base_name = next(iter(bases)) if len(bases) == 1 else first.path
    if base_name.startswith(("/", "~", "file:")):
        base_name = base_name.rstrip("/").rpartition("/")[2]
    adapter = NewAdapter(
        base=base_name,
        factors=factors,
        embeddings=tables,
        biases={module: bias for module, bias in _biases(base, whole).items() if module in factors},
        whole=_saved(base, whole, factors),
        transposed=any(modules[name].transposed for name in names if not modules[name].is_embedding),
        task=next(iter(tasks)) if len(tasks) == 1 else "CAUSAL_LM",
    )
    errors = tuple(ModuleError(modules[name].name, len(found[name].a), found[name].error) for name in names)
    left, all_of_it = (sum(getattr(one, key) for one in found.values()) for key in ("left_out", "squared"))
    return Combined(adapter, errors, math.sqrt(max(left, 0.0) / all_of_it) if all_of_it else 0.0)


def format_of_factors(recipe: Recipe) -> torch.dtype:
    """Of the factors: what the recipe says, else float32."""
    import torch

    said = recipe.out_dtype or recipe.dtype
    return getattr(torch, said.torch_name) if said else torch.float32
