"""Match the experts of different mixtures by their weights, and renumber them if the recipe requests it.

The numbering of experts is arbitrary: renumbering them together with the rows of their router does not change a
mixture's output. Fine-tunes of one base share its numbering. Mixtures of different origin do not, so a merge of expert
``i`` with expert ``i`` would combine unrelated experts. For every layer, this module measures the mean cosine of router
rows and projections between all pairs of experts, and compares the best assignment (Hungarian method, Kuhn 1955) with
the current one::

    matched = match_experts(recipe, checkpoints)
    plan = plan_merge(matched.recipe, matched.checkpoints)
    matched.findings, matched.layers            # experts that do not correspond, and differences of the routers

With ``align_experts: true``, the experts of the other models are renumbered to match the donor's. If a router first
chooses among groups of experts, whole groups are assigned to each other, and experts within them. The rows and biases
of the router move with the experts, and shared experts stay in place. The matching reads a fixed sample of each tensor,
and runs before planning, because plans read no weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.architecture.experts.pieces import permuted_rows, split_experts
from mergegate.merge_core.checkpoint import (
    AnyTensor,
    Checkpoint,
    DerivedTensor,
    StoredTensor,
    config_parts,
    numbers,
    patterns,
    read_into,
)
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.recipe import InputMeasurements, Recipe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# Number of samples of a projection and elements of each. The cosine of a few thousand elements is within a few
# hundredths of the cosine of all elements.
_RUNS, _RUN = 8, 512
# Maximum number of sampled elements of a router row. Rows are short and cheap to read.
_ROW = 8192
# Improvement of the mean cosine that counts. A slightly better assignment exists even between unrelated experts.
_MIN_IMPROVEMENT = 0.1
# Below this mean cosine, experts are unrelated in any order.
_UNRELATED = 0.3
_EXPERT = re.compile(r"^(?P<module>.+)\.experts\.(?P<number>[0-9]{1,4})\.(?P<part>.+)$")
# Parts of a module of experts with one row, or one number, for each expert.
_ROUTER = re.compile(
    r"^(?:(?:gate|router)(?:\.layer)?\.(?:weight|bias)|(?:gate\.|router\.|experts\.)?e_score_correction_bias"
    r"|expert_bias|router\.expert_bias)$"
)


@dataclass(frozen=True)
class StoredRouter:
    """Router of the module of experts ``module``: its matrix, ``[experts, width]``, and its biases, if it has them.

    A correction bias, which only affects the selection, is not among the biases.
    """

    module: str
    weight: AnyTensor
    bias: AnyTensor | None

    @property
    def tensors(self) -> tuple[AnyTensor, ...]:
        """The matrix and, if there are any, the biases."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class MatchedLayer:
    """Correspondence between the experts of a model and those of the donor in one layer."""

    model: str  # reference of the model
    module: str  # name of the module in the network, such as ``model.layers.3.mlp``
    experts: int  # number of experts
    diagonal: float  # mean cosine between experts with equal numbers
    best: float  # mean cosine between experts that the best assignment pairs
    moved: int  # number of experts that the best assignment renumbers
    routers: float  # mean cosine between the router rows of experts that are merged with each other
    distance: float  # norm of the difference between the two routers, divided by the norm of the donor's router


@dataclass(frozen=True)
class MatchedExperts:
    """Result of matching experts."""

    # Recipe for the plan. With ``align_experts``, its measurements are renumbered like the experts.
    recipe: Recipe
    # All checkpoints by reference. With ``align_experts``, their experts are in the donor's order.
    checkpoints: Mapping[str, Checkpoint]
    # Correspondence for each model and module of experts. Empty if there are no experts to compare.
    layers: tuple[MatchedLayer, ...]
    findings: tuple[Finding, ...]  # warnings about experts that do not correspond


@dataclass(frozen=True)
class _Module:
    """Experts of one layer: the parts of each expert, and the router's tensors with one row for each expert."""

    experts: tuple[Mapping[str, AnyTensor], ...]
    router: Mapping[str, AnyTensor]
    unknown: tuple[str, ...]  # Tensors of unknown meaning that may depend on the order of the experts.


def match_experts(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> MatchedExperts:
    """Compare the experts of all models in ``recipe`` with the donor's, and renumber them with ``align_experts``.

    Raises:
        InvalidInput: A file cannot be read. Or the recipe sets ``align_experts``, but it has steps or slices, the donor
            has no experts, or it is unknown how a tensor depends on their order.
    """
    donor = recipe.donor
    is_sliced = any(source.layers is not None for source in recipe.sources)
    if recipe.align_experts and (recipe.steps or is_sliced):
        raise InvalidInput(
            f"{recipe.location}: align_experts",
            found="a recipe of several documents" if recipe.steps else "a recipe of slices",
            expected="whole models, merged in one step",
            remedy="align and merge the models first, then use the result",
        )
    table = dict(checkpoints)
    names = [str(source.model) for source in recipe.sources if source.model != donor]
    if recipe.mixture is not None or is_sliced or str(donor) not in table:
        return MatchedExperts(recipe, table, (), ())
    donor_checkpoint = split_experts(table[str(donor)])
    modules = _modules(donor_checkpoint)
    if recipe.align_experts and not modules:
        raise InvalidInput(
            f"{recipe.location}: align_experts",
            found=f"{donor} has no experts",
            expected="mixtures of experts",
            remedy="remove the key",
        )
    layers: list[MatchedLayer] = []
    findings: list[Finding] = []
    measured = dict(recipe.measured) if recipe.measured is not None else None
    for name in dict.fromkeys(names):
        if name not in table or not modules:
            continue  # The result of a step has the order of the step's parents.
        parent = split_experts(table[name])
        matched, orders = _match(donor_checkpoint, modules, name, parent, recipe)
        layers += matched
        findings += _findings(str(donor), name, matched, is_aligned=recipe.align_experts)
        if recipe.align_experts:
            measurements = measured.get(name) if measured else None
            table[name], measurements = _renumber(name, parent, measurements, orders)
            if measured and measurements:
                measured[name] = measurements
    recipe = replace(recipe, experts_in_order=True, measured=measured)
    return MatchedExperts(recipe, table, tuple(layers), tuple(findings))


def find_routers(checkpoint: Checkpoint) -> dict[str, StoredRouter]:
    """Return the router of each module of experts in ``checkpoint``, by the name of the module."""
    routers = {}
    for name, module in _modules(split_experts(checkpoint)).items():
        matrices = [tensor for tensor in module.router.values() if len(tensor.shape) == 2]
        if len(matrices) == 1 and matrices[0].dtype.kind == "float" and len(module.experts) > 1:
            biases = [t for t in module.router.values() if t.name == f"{matrices[0].name.removesuffix('weight')}bias"]
            routers[name] = StoredRouter(name, matrices[0], biases[0] if biases else None)
    return routers


def read_routers(routers: Iterable[StoredRouter]) -> dict[str, Floats]:
    """Return the matrix of each router in float64, with the biases as the last column if it has them, by module.

    Raises:
        InvalidInput: A file cannot be read, or a router contains NaN or infinity.
    """
    matrices = {}
    with _Samples() as samples:
        for router in routers:
            columns = [
                samples.read(tensor, [0], tensor.numel).reshape(tensor.shape[0], -1) for tensor in router.tensors
            ]
            matrices[router.module] = np.concatenate(columns, axis=1)
            if not np.isfinite(matrices[router.module]).all():
                raise InvalidInput(router.weight.name, found="a router with NaN or infinity", expected="finite numbers")
    return matrices


def assign(similarity: Floats, groups: int = 1) -> list[int]:
    """Assign the experts of a second model to those of a first so that the total similarity is maximal.

    ``similarity`` has the shape ``[experts, experts]``, with the experts of the first model as rows. With several
    equal ``groups`` of consecutive experts, whole groups are assigned to each other, and experts within them.

    Returns:
        For each expert of the first model, the number of its counterpart in the second model.
    """
    from scipy.optimize import linear_sum_assignment

    size = len(similarity) // groups
    blocks = similarity.reshape(groups, size, groups, size).transpose(0, 2, 1, 3)
    inner = [[linear_sum_assignment(-block)[1] for block in row] for row in blocks]
    scores = [
        [block[np.arange(size), inner[first][second]].sum() for second, block in enumerate(row)]
        for first, row in enumerate(blocks)
    ]
    outer = linear_sum_assignment(-np.asarray(scores))[1]
    return [int(second) * size + int(expert) for first, second in enumerate(outer) for expert in inner[first][second]]


def _match(
    donor: Checkpoint, modules: Mapping[str, _Module], name: str, parent: Checkpoint, recipe: Recipe
) -> tuple[list[MatchedLayer], dict[str, list[int]]]:
    """Return the correspondence for each module, and the new order of the experts for each module to renumber."""
    other_modules, layers = _modules(parent), []
    orders: dict[str, list[int]] = {}
    with _Samples() as samples:
        for module_name, module in modules.items():
            other_module = other_modules.get(module_name)
            if other_module is None or len(other_module.experts) != len(module.experts):
                continue  # The plan refuses missing experts.
            tables = [*module.experts, *other_module.experts, module.router, other_module.router]
            *experts, router, other_router = ({part: tensor.shape for part, tensor in t.items()} for t in tables)
            if any(shapes != experts[0] for shapes in experts) or router != other_router:
                continue  # The plan refuses other shapes.
            if any(tensor.dtype.kind != "float" for table in tables for tensor in table.values()):
                continue
            similarity = samples.similarity(module, other_module)
            groups = _groups(donor.config, len(module.experts))
            order = assign(similarity, groups)
            numbering = np.arange(len(order))
            moved = int(np.count_nonzero(np.asarray(order) != numbering))
            if recipe.align_experts and moved:
                orders[module_name] = order
            cosine, distance = samples.routers(module, other_module, orders.get(module_name, range(len(order))))
            layer = MatchedLayer(
                model=name,
                module=module_name,
                experts=len(order),
                diagonal=float(similarity.diagonal().mean()),
                best=float(similarity[numbering, order].mean()),
                moved=moved,
                routers=cosine,
                distance=distance,
            )
            layers.append(layer)
    return layers, orders


def _findings(donor: str, name: str, layers: Sequence[MatchedLayer], *, is_aligned: bool) -> Iterator[Finding]:
    crossed = [layer for layer in layers if layer.moved and layer.best - layer.diagonal > _MIN_IMPROVEMENT]
    unrelated = [layer for layer in layers if layer.best < _UNRELATED]
    if crossed and not is_aligned:
        worst = max(crossed, key=lambda layer: layer.best - layer.diagonal)
        yield Finding(
            "warn",
            f"{name}: {worst.module}.experts",
            found=f"the order of the experts differs from {donor} in {len(crossed)} of {len(layers)} layers: mean "
            f"cosine {worst.diagonal:.2f} in the current order, {worst.best:.2f} in the best order",
            expected="experts with the same number have the same function in both models",
            remedy="set align_experts: true",
        )
    if unrelated:
        worst = min(unrelated, key=lambda layer: layer.best)
        yield Finding(
            "warn",
            f"{name}: {worst.module}.experts",
            found=f"the experts are not related to those of {donor} in any order, in {len(unrelated)} of "
            f"{len(layers)} layers: mean cosine {worst.best:.2f}",
            expected="related experts: merging unrelated ones rarely helps",
            remedy="merge mixtures that were fine-tuned from one base",
        )


def _modules(checkpoint: Checkpoint) -> dict[str, _Module]:
    """Return the modules of experts by name, from a table of single experts."""
    experts: dict[str, dict[int, dict[str, AnyTensor]]] = {}
    for name, tensor in checkpoint.tensors.items():
        if match := _EXPERT.match(name):
            experts.setdefault(match["module"], {}).setdefault(int(match["number"]), {})[match["part"]] = tensor
    other_tensors: dict[str, dict[str, AnyTensor]] = {module: {} for module in experts}
    for name, tensor in checkpoint.tensors.items():
        if _EXPERT.match(name):
            continue
        module = name
        while "." in module:  # Shared experts may be several levels below the module.
            module = module.rpartition(".")[0]
            if module in other_tensors:
                other_tensors[module][name.removeprefix(f"{module}.")] = tensor
                break
    modules = {}
    for module, numbered in experts.items():
        count, others = len(numbered), other_tensors[module]
        if sorted(numbered) != list(range(count)):
            continue
        router = {part: item for part, item in others.items() if _ROUTER.match(part) and item.shape[:1] == (count,)}
        unshared = {part: item for part, item in others.items() if part not in router and "shared" not in part}
        unknown = tuple(part for part, item in unshared.items() if count in item.shape)
        modules[module] = _Module(tuple(numbered[number] for number in range(count)), router, unknown)
    return modules


def _renumber(
    model: str, checkpoint: Checkpoint, measurements: InputMeasurements | None, orders: Mapping[str, Sequence[int]]
) -> tuple[Checkpoint, InputMeasurements | None]:
    """Return a model and its measurements, with expert ``order[i]`` of each module and its router row at number i."""
    table, modules = dict(checkpoint.tensors), _modules(checkpoint)
    importance = dict(measurements.importance) if measurements else {}
    names = {name: name for name in (*measurements.moments, *importance)} if measurements else {}
    for module_name, order in orders.items():
        module = modules[module_name]
        if module.unknown or not any(len(tensor.shape) == 2 for tensor in module.router.values()):
            raise InvalidInput(
                f"{model}: {module_name}.{module.unknown[0] if module.unknown else 'experts'}",
                found="mergegate does not know how this tensor depends on the order of the experts"
                if module.unknown
                else "the experts have no router",
                expected="a router that can be reordered together with its experts",
                remedy="remove align_experts, or reorder the experts of the model first",
            )
        new_names = {
            f"{module_name}.experts.{number}.{part}": f"{module_name}.experts.{old_number}.{part}"
            for number, old_number in enumerate(order)
            for part in module.experts[old_number]
        }
        names |= new_names
        table |= {new_name: replace(checkpoint.tensors[name], name=new_name) for new_name, name in new_names.items()}
        for part, tensor in module.router.items():
            name = f"{module_name}.{part}"
            table[name] = permuted_rows(tensor, order)
            if name in importance:
                importance[name] = permuted_rows(importance[name], order)
    if measurements is not None:
        measurements = replace(
            measurements,
            moments={name: measurements.moments[old] for name, old in names.items() if old in measurements.moments},
            importance={name: importance[old] for name, old in names.items() if old in importance},
        )
    return replace(checkpoint, tensors=table), measurements


def _groups(config: Mapping[str, Any], experts: int) -> int:
    counts = (part.get("n_group") or 1 for part in config_parts(config))
    return next((count for count in counts if 1 < count <= experts and experts % count == 0), 1)


class _Samples(ExitStack):
    """Reader that compares samples of tensors and keeps their files open."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, int] = {}

    def similarity(self, first: _Module, second: _Module) -> Floats:
        """Return the mean cosine of router rows and projections for all pairs of experts, ``[experts, experts]``."""
        cosines = []
        for part, tensor in first.experts[0].items():
            if tensor.numel >= 2:
                samples = [np.stack([self._sample(e[part]) for e in module.experts]) for module in (first, second)]
                cosines.append(_cosines(*samples))
        for part, tensor in first.router.items():
            if len(tensor.shape) == 2:
                cosines.append(_cosines(self._rows(tensor), self._rows(second.router[part])))
        mean: Floats = np.mean(cosines, axis=0)
        return mean

    def routers(self, first: _Module, second: _Module, order: Sequence[int]) -> tuple[float, float]:
        """Return the mean cosine of the routers' rows, with those of the second in ``order``, and their distance.

        The distance is the norm of the difference divided by the norm of the first router.
        """
        for part, tensor in first.router.items():
            if len(tensor.shape) == 2:
                rows, other_rows = self._rows(tensor), self._rows(second.router[part])[list(order)]
                norm = float(np.linalg.norm(rows)) or 1.0
                cosine = float(_cosines(rows, other_rows).diagonal().mean())
                return cosine, float(np.linalg.norm(other_rows - rows)) / norm
        return 0.0, 0.0

    def _rows(self, tensor: AnyTensor) -> Floats:
        rows, width = tensor.shape
        return self.read(tensor, range(0, rows * width, width), min(width, _ROW)).reshape(rows, -1)

    def _sample(self, tensor: AnyTensor) -> Floats:
        if tensor.numel <= _RUNS * _RUN:
            return self.read(tensor, [0], tensor.numel)
        return self.read(tensor, np.linspace(0, tensor.numel - _RUN, _RUNS).astype(int).tolist(), _RUN)

    def read(self, tensor: AnyTensor, starts: Sequence[int], count: int) -> Floats:
        """Read ``count`` elements from each position in ``starts`` and return them in one array."""
        size = count * tensor.dtype.size
        into = np.empty(len(starts) * size, np.uint8)
        elements = tensor.open(self._stored) if isinstance(tensor, DerivedTensor) else partial(self._stored, tensor)
        for number, first in enumerate(starts):
            elements(first, into[number * size : (number + 1) * size])
        return numbers(patterns(into, tensor.dtype), tensor.dtype).astype(np.float64)

    def _stored(self, tensor: StoredTensor, first: int, into: NDArray[np.uint8]) -> None:
        if tensor.file not in self._files:
            try:
                self._files[tensor.file] = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise InvalidInput(str(tensor.file), found=f"cannot be read: {error.strerror}") from None
            self.callback(os.close, self._files[tensor.file])
        read_into(self._files[tensor.file], into.data, tensor.offset + first * tensor.dtype.size, tensor.file)


def _cosines(first: Floats, second: Floats) -> Floats:
    """Return the cosines of all pairs of rows.

    A cosine is 0 if a row is zero or not finite. The merge itself refuses values that are not finite.
    """
    with np.errstate(all="ignore"):
        units = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (first, second)]
        cosines: Floats = np.nan_to_num(units[0] @ units[1].T, nan=0.0, posinf=0.0, neginf=0.0)
    return cosines
