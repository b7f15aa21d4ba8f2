"""Which expert of one mixture is which expert of another: measured on the weights, and put in order when asked.

Experts may be renumbered, together with the rows of their router, without changing what a mixture computes. Fine-tunes
of one base keep its numbering; mixtures that were made apart do not, and a merge of expert ``i`` with expert ``i`` then
mixes strangers. So of every layer the mean cosine of router rows and projections between all pairs of experts is taken,
and the best assignment (Kuhn 1955, the Hungarian method) is compared with the one that stands::

    matched = match_experts(recipe, checkpoints)
    plan = plan_merge(matched.recipe, matched.checkpoints)
    matched.findings, matched.layers            # what does not correspond; how far the routers differ

With ``align_experts: true`` the experts of the other models are renumbered as the donor's; where a router chooses among
groups of experts first, within groups, and whole groups. Rows and biases of the router move along, shared experts stay.
A renumbered table is a view, as that of single experts is.

Weights are read here, a fixed sample of each tensor, so this is no part of a plan: it runs before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.architecture.experts.permutation import permuted_rows
from mergegate.merge_core.architecture.experts.pieces import split_experts
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

# Elements of a projection that are looked at, in so many runs: cosines of a few thousand numbers are within a few
# hundredths of those of all.
_RUNS, _RUN = 8, 512
# Elements of a router's row that are looked at. Rows are short, and all of them are cheap to read.
_ROW = 8192
# A better assignment by less than this says nothing: between strangers one is always found.
_BETTER = 0.1
# Below this mean cosine experts have nothing in common, whatever their order.
_STRANGERS = 0.3
_EXPERT = re.compile(r"^(?P<module>.+)\.experts\.(?P<number>[0-9]{1,4})\.(?P<part>.+)$")
# Parts of a module of experts that have one row, or one number, for each.
_ROUTER = re.compile(
    r"^(?:(?:gate|router)(?:\.layer)?\.(?:weight|bias)|(?:gate\.|router\.|experts\.)?e_score_correction_bias"
    r"|expert_bias|router\.expert_bias)$"
)


@dataclass(frozen=True)
class MatchedLayer:
    """How the experts of a model correspond to those of the donor in one layer.

    Args:
        model: Reference of the model.
        module: Where in the network: ``model.layers.3.mlp``.
        experts: How many there are.
        diagonal: Mean cosine of expert i and expert i, as they stand.
        best: The same of the best assignment.
        moved: How many experts it renumbers.
        routers: Mean cosine of the router rows of corresponding experts, as they are merged.
        distance: Length of the difference of these routers over that of the donor's.
    """

    model: str
    module: str
    experts: int
    diagonal: float
    best: float
    moved: int
    routers: float
    distance: float


@dataclass(frozen=True)
class MatchedExperts:
    """What a merge goes on with.

    Args:
        recipe: The recipe, with the mark that its experts are in order, and what was measured of them in that order.
        checkpoints: Every checkpoint by reference; with ``align_experts``, with its experts in the donor's order.
        layers: One for each model and module of experts; empty where there are none to compare.
        findings: Experts that do not correspond, a finding a model.
    """

    recipe: Recipe
    checkpoints: Mapping[str, Checkpoint]
    layers: tuple[MatchedLayer, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Module:
    """Experts of one layer: for each their parts, and what the router has of them."""

    experts: tuple[Mapping[str, AnyTensor], ...]
    router: Mapping[str, AnyTensor]
    strange: tuple[str, ...]  # tensors of unknown meaning that may speak of experts


def match_experts(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> MatchedExperts:
    """Compare the experts of all models that ``recipe`` merges with those of its donor; renumber them if it says so.

    Raises:
        InvalidInput: ``align_experts`` where experts cannot be put in order: in a recipe of steps or of slices, or with
            tensors of which nobody knows how they belong to experts. A file that cannot be read.
    """
    donor = recipe.donor
    sliced = any(source.layers is not None for source in recipe.sources)
    if recipe.align_experts and (recipe.steps or sliced):
        raise InvalidInput(
            f"{recipe.where}: align_experts",
            found="a recipe of several documents" if recipe.steps else "a recipe of slices",
            expected="whole models, merged in one step",
            remedy="align and merge the models first, then use the result",
        )
    known = dict(checkpoints)
    names = [str(source.model) for source in recipe.sources if source.model != donor]
    if recipe.mixture is not None or sliced or str(donor) not in known:
        return MatchedExperts(recipe, known, (), ())
    first = split_experts(known[str(donor)])
    modules = _modules(first)
    if recipe.align_experts and not modules:
        raise InvalidInput(
            f"{recipe.where}: align_experts",
            found=f"{donor} has no experts",
            expected="mixtures of experts",
            remedy="remove the key",
        )
    layers: list[MatchedLayer] = []
    findings: list[Finding] = []
    measured = dict(recipe.measured) if recipe.measured is not None else None
    for name in dict.fromkeys(names):
        if name not in known or not modules:
            continue  # A step's result: it has the order of what it was made of.
        other = split_experts(known[name])
        matched, orders = _match(str(donor), first, modules, name, other, recipe)
        layers += matched
        findings += _findings(str(donor), name, matched, aligned=recipe.align_experts)
        if recipe.align_experts:
            known[name] = _in_order(other, orders)
            if measured and name in measured:
                measured[name] = _measured_in_order(measured[name], _modules(other), orders)
    recipe = replace(recipe, experts_in_order=True, measured=measured)
    return MatchedExperts(recipe, known, tuple(layers), tuple(findings))


def assign(similarity: Floats, groups: int = 1) -> list[int]:
    """For each expert of the first model that of the second which is most like it, as a whole.

    Args:
        similarity: ``[experts, experts]``.
        groups: Of so many equal runs of experts each is assigned to one of the other model, and experts within.
    """
    from scipy.optimize import linear_sum_assignment

    size = len(similarity) // groups
    blocks = similarity.reshape(groups, size, groups, size).transpose(0, 2, 1, 3)
    inner = [[linear_sum_assignment(-block)[1] for block in row] for row in blocks]
    scores = [
        [block[np.arange(size), inner[one][two]].sum() for two, block in enumerate(row)]
        for one, row in enumerate(blocks)
    ]
    outer = linear_sum_assignment(-np.asarray(scores))[1]
    return [int(two) * size + int(expert) for one, two in enumerate(outer) for expert in inner[one][two]]


def _match(
    donor: str,
    first: Checkpoint,
    modules: Mapping[str, _Module],
    name: str,
    other: Checkpoint,
    recipe: Recipe,
) -> tuple[list[MatchedLayer], dict[str, list[int]]]:
    """How they correspond; and of each module that is to be renumbered, which expert comes in the place of which."""
    theirs, found = _modules(other), []
    orders: dict[str, list[int]] = {}
    with _Samples() as samples:
        for place, module in modules.items():
            own = theirs.get(place)
            if own is None or len(own.experts) != len(module.experts) or not _comparable(module, own):
                continue  # What is missing, or has another shape, the plan refuses.
            similarity = samples.similarity(module, own)
            groups = _groups(first.config, len(module.experts))
            order = assign(similarity, groups)
            count = np.arange(len(order))
            moved = int(np.count_nonzero(np.asarray(order) != count))
            used = list(order) if recipe.align_experts else list(range(len(order)))
            if recipe.align_experts and moved:
                _require_known(name, place, own)
                orders[place] = order
            rows, distance = samples.routers(module, own, used)
            found.append(
                MatchedLayer(
                    model=name,
                    module=place,
                    experts=len(order),
                    diagonal=float(similarity.diagonal().mean()),
                    best=float(similarity[count, order].mean()),
                    moved=moved,
                    routers=rows,
                    distance=distance,
                )
            )
    return found, orders


def _findings(donor: str, name: str, layers: Sequence[MatchedLayer], *, aligned: bool) -> Iterator[Finding]:
    crossed = [one for one in layers if one.moved and one.best - one.diagonal > _BETTER]
    strangers = [one for one in layers if one.best < _STRANGERS]
    if crossed and not aligned:
        worst = max(crossed, key=lambda one: one.best - one.diagonal)
        yield Finding(
            "warn",
            f"{name}: {worst.module}.experts",
            found=f"experts in another order than in {donor}, in {len(crossed)} of {len(layers)} layers: mean cosine "
            f"{worst.diagonal:.2f} as they stand, {worst.best:.2f} in the best order",
            expected="expert i of one model merged with the expert of the other that does the same",
            remedy="set align_experts: true",
        )
    if strangers:
        worst = min(strangers, key=lambda one: one.best)
        yield Finding(
            "warn",
            f"{name}: {worst.module}.experts",
            found=f"experts that have little in common with those of {donor} in any order, in {len(strangers)} of "
            f"{len(layers)} layers: mean cosine {worst.best:.2f}",
            expected="relatives: a merge of strangers is seldom of use",
            remedy="merge mixtures that come from one base",
        )


def _modules(checkpoint: Checkpoint) -> dict[str, _Module]:
    """Modules of experts by name, of a table of single experts."""
    experts: dict[str, dict[int, dict[str, AnyTensor]]] = {}
    for name, tensor in checkpoint.tensors.items():
        if match := _EXPERT.match(name):
            experts.setdefault(match["module"], {}).setdefault(int(match["number"]), {})[match["part"]] = tensor
    beside: dict[str, dict[str, AnyTensor]] = {module: {} for module in experts}
    for name, tensor in checkpoint.tensors.items():
        if _EXPERT.match(name):
            continue
        module = name
        while "." in module:  # Shared experts may lie deep below.
            module = module.rpartition(".")[0]
            if module in beside:
                beside[module][name.removeprefix(f"{module}.")] = tensor
                break
    found = {}
    for module, numbered in experts.items():
        count = len(numbered)
        if sorted(numbered) != list(range(count)):
            continue
        router = {
            part: tensor
            for part, tensor in beside[module].items()
            if _ROUTER.match(part) and tensor.shape[:1] == (count,)
        }
        strange = tuple(
            part
            for part, tensor in beside[module].items()
            if part not in router and "shared" not in part and count in tensor.shape
        )
        found[module] = _Module(tuple(numbered[number] for number in range(count)), router, strange)
    return found


def _comparable(one: _Module, other: _Module) -> bool:
    """Whether all experts of both have the same parts, of the same sizes and of floating point."""
    tables = [*one.experts, *other.experts, one.router, other.router]
    shapes = [{part: tensor.shape for part, tensor in table.items()} for table in tables]
    experts, routers = shapes[:-2], shapes[-2:]
    floats = all(tensor.dtype.kind == "float" for table in tables for tensor in table.values())
    return floats and all(one == experts[0] for one in experts) and routers[0] == routers[1]


def _require_known(name: str, place: str, module: _Module) -> None:
    rows = [part for part, tensor in module.router.items() if len(tensor.shape) == 2]
    if module.strange or not rows:
        what = f"{place}.{module.strange[0]}" if module.strange else f"{place}.experts"
        raise InvalidInput(
            f"{name}: {what}",
            found="a tensor of which nobody knows how it belongs to experts" if module.strange else "no router beside",
            expected="a router that can be put in order with its experts",
            remedy="merge without align_experts, or put the experts in order before",
        )


def _in_order(checkpoint: Checkpoint, orders: Mapping[str, Sequence[int]]) -> Checkpoint:
    """Expert ``i`` of a module becomes its expert ``order[i]``, and so does its part of the router."""
    table, modules = dict(checkpoint.tensors), _modules(checkpoint)
    for place, order in orders.items():
        for name, chosen in _renamed_experts(place, modules[place], order):
            table[name] = replace(checkpoint.tensors[chosen], name=name)
        for part, tensor in modules[place].router.items():
            table[f"{place}.{part}"] = permuted_rows(tensor, order)
    return replace(checkpoint, tensors=table)


def _measured_in_order(
    measured: InputMeasurements, modules: Mapping[str, _Module], orders: Mapping[str, Sequence[int]]
) -> InputMeasurements:
    """What a model showed, of its experts under their new numbers."""
    names = {name: name for name in (*measured.moments, *measured.importance)}
    importance = dict(measured.importance)
    for place, order in orders.items():
        names |= _renamed_experts(place, modules[place], order)
        for part in modules[place].router:
            if (own := importance.get(f"{place}.{part}")) is not None:
                importance[f"{place}.{part}"] = permuted_rows(own, order)
    return replace(
        measured,
        moments={name: measured.moments[own] for name, own in names.items() if own in measured.moments},
        importance={name: importance[own] for name, own in names.items() if own in importance},
    )


def _renamed_experts(place: str, module: _Module, order: Sequence[int]) -> Iterator[tuple[str, str]]:
    """``(new name, name)`` of every tensor of an expert."""
    for number, chosen in enumerate(order):
        for part in module.experts[chosen]:
            yield f"{place}.experts.{number}.{part}", f"{place}.experts.{chosen}.{part}"


def _groups(config: Mapping[str, Any], experts: int) -> int:
    counts = (part.get("n_group") or 1 for part in config_parts(config))
    return next((count for count in counts if 1 < count <= experts and experts % count == 0), 1)


class _Samples:
    """Parts of tensors, read and compared; files stay open in between."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def __enter__(self) -> _Samples:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def similarity(self, one: _Module, other: _Module) -> Floats:
        """``[experts, experts]``: mean cosine of router rows and projections."""
        views = []
        for part in one.experts[0]:
            if one.experts[0][part].numel < 2:
                continue
            mine = np.stack([self._sample(expert[part]) for expert in one.experts])
            theirs = np.stack([self._sample(expert[part]) for expert in other.experts])
            views.append(_cosines(mine, theirs))
        for part, tensor in one.router.items():
            if len(tensor.shape) == 2:
                views.append(_cosines(self._rows(tensor), self._rows(other.router[part])))
        found: Floats = np.mean(views, axis=0)
        return found

    def routers(self, one: _Module, other: _Module, order: Sequence[int]) -> tuple[float, float]:
        """Mean cosine of router rows, the other's in ``order``; and their distance over the length of the first."""
        for part, tensor in one.router.items():
            if len(tensor.shape) == 2:
                mine, theirs = self._rows(tensor), self._rows(other.router[part])[list(order)]
                length = float(np.linalg.norm(mine)) or 1.0
                return float(_cosines(mine, theirs).diagonal().mean()), float(np.linalg.norm(theirs - mine)) / length
        return 0.0, 0.0

    def _rows(self, tensor: AnyTensor) -> Floats:
        rows, width = tensor.shape
        count = min(width, _ROW)
        return self._read(tensor, [row * width for row in range(rows)], count).reshape(rows, count)

    def _sample(self, tensor: AnyTensor) -> Floats:
        if tensor.numel <= _RUNS * _RUN:
            return self._read(tensor, [0], tensor.numel)
        starts = np.linspace(0, tensor.numel - _RUN, _RUNS).astype(int)
        return self._read(tensor, starts.tolist(), _RUN)

    def _read(self, tensor: AnyTensor, starts: Sequence[int], count: int) -> Floats:
        """``count`` elements from each of ``starts``, one after the other."""
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
        read_into(self._files[tensor.file], into.data, tensor.offset + first * tensor.dtype.size, tensor.file)


def _cosines(one: Floats, other: Floats) -> Floats:
    """Between all rows; 0 where a row is zero or not finite (which the merge itself refuses)."""
    with np.errstate(all="ignore"):
        units = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (one, other)]
        found: Floats = np.nan_to_num(units[0] @ units[1].T, nan=0.0, posinf=0.0, neginf=0.0)
    return found
