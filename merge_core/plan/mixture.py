"""The plan of a mixture of experts: every output tensor is one tensor of one dense model, or a row set of a router.

Attention, norms, embeddings and head are the base's; experts are the feed-forward layers of their models, with noise
and scale. Everything that a model holds of the part that is asked of it is used, or the plan says that it has no place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.architecture import (
    find_tensor,
    is_head,
    is_optional,
    parse_layer_place,
    ties_embeddings,
    with_dtype,
)
from mergegate.merge_core.architecture.experts import OutputFamily, choose_output, constant_tensor, mixture_config
from mergegate.merge_core.checkpoint import AnyTensor, Checkpoint, DType, promote
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.plan.jobs import Input, TensorJob
from mergegate.merge_core.plan.layout import OutputTensor
from mergegate.merge_core.recipe import Expert, GateRows, Mixture, Recipe

_FEED_FORWARD = re.compile(r"^mlp\.(?:gate_proj|up_proj|down_proj)\.weight$")
_STACK = "model.layers"
# Rows of length one whose cosine is above are nearly one row.
_ALIKE = 0.999
_MOST_NEAR = 5
_DENSE = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MixturePlan:
    """Jobs and configuration of a mixture."""

    jobs: list[TensorJob]
    config: dict[str, Any]


def plan_mixture(
    recipe: Recipe, mixture: Mixture, checkpoints: Mapping[str, Checkpoint], problems: list[Finding]
) -> MixturePlan:
    """Jobs and configuration of the mixture that ``recipe`` asks for.

    Raises:
        InvalidInput: No family of mixtures fits the models.
    """
    reference = str(recipe.base)
    base = checkpoints[reference]
    prompts = any(expert.positive for expert in mixture.shared)
    family = choose_output(
        mixture.output,
        str(base.config.get("model_type", "")),
        shared=bool(mixture.shared),
        prompts=prompts,
        where=recipe.where,
    )
    config = mixture_config(base.config, family, len(mixture.experts), mixture.per_token, reference)
    gates, wanted = mixture.gates, (config["num_hidden_layers"], len(mixture.all_experts), config["hidden_size"])
    if gates is not None and (gates.layers, gates.rows, gates.width) != wanted:
        raise InvalidInput(
            f"{recipe.where}: router rows",
            found=f"[layers, rows, width] = {[gates.layers, gates.rows, gates.width]}",
            expected=f"{list(wanted)}, as config.json of {reference} and the recipe say",
        )
    problems += _misfits(reference, base, mixture, family, checkpoints)
    builder = _Builder(recipe, mixture, family, checkpoints, base, config["num_hidden_layers"], config["hidden_size"])
    jobs = list(builder.jobs(problems))
    return MixturePlan(jobs, with_dtype(config, _bulk(jobs)))


@dataclass(frozen=True)
class _Builder:
    recipe: Recipe
    mixture: Mixture
    family: OutputFamily
    checkpoints: Mapping[str, Checkpoint]
    base: Checkpoint
    layers: int
    width: int

    def jobs(self, problems: list[Finding]) -> Iterator[TensorJob]:
        """All jobs; those of no further layer after one with which something is wrong."""
        reference, before = str(self.recipe.base), len(problems)
        for name, tensor in self.base.tensors.items():
            kept = ties_embeddings(self.base.config) is not True if is_head(name) else not is_optional(name)
            if parse_layer_place(name) is None and kept:
                yield self._copied(name, reference, tensor)
        for layer in range(self.layers):
            for part in self.family.carried:
                name = f"{_STACK}.{layer}.{part}"
                if (own := find_tensor(self.base, name)) is not None:
                    yield self._copied(name, reference, own)
                elif not (part.endswith(".bias") or "_norm." in part):
                    problems.append(_missing(reference, name))
            yield from self._biases(layer)
            yield from self._feed_forward(layer, problems)
            if len(problems) > before:  # A config may name any number of layers.
                return

    def _copied(self, name: str, reference: str, tensor: AnyTensor) -> TensorJob:
        dtype = self.recipe.out_dtype or self.recipe.dtype or tensor.dtype
        return _job(name, dtype if tensor.dtype.kind == "float" else tensor.dtype, reference, tensor)

    def _biases(self, layer: int) -> Iterator[TensorJob]:
        """Zeros, where the family has biases and the base has none."""
        if not self.family.biased:
            return
        for part in ("q_proj", "k_proj", "v_proj"):
            name = f"{_STACK}.{layer}.self_attn.{part}"
            weight = self.base.tensors.get(f"{name}.weight")
            if weight is not None and f"{name}.bias" not in self.base.tensors:
                yield self._given(f"{name}.bias", weight.shape[:1], self._format([weight]))

    def _feed_forward(self, layer: int, problems: list[Finding]) -> Iterator[TensorJob]:
        module = f"{_STACK}.{layer}.{self.family.module}"
        tensors = [self._dense(expert, layer, problems) for expert in self.mixture.all_experts]
        if any(len(one) < len(_DENSE) for one in tensors):
            return
        sizes, said = tensors[0][0].shape, (self.base.config.get("intermediate_size"), self.width)
        if sizes != said:
            problems.append(
                Finding(
                    "block",
                    f"{self.recipe.base}: config.json: intermediate_size, hidden_size",
                    found=f"{list(said)}",
                    expected=f"{list(sizes)}, as {tensors[0][0].name} of {self.mixture.experts[0].model} has",
                    remedy="make the mixture of models of one size, or repair the config",
                )
            )
            return
        dtype = self._format([tensor for one in tensors for tensor in one])
        if dtype is None:
            return
        count = len(self.mixture.experts)
        for number, (expert, own) in enumerate(zip(self.mixture.all_experts, tensors, strict=True)):
            shared = number >= count
            place = f"{module}.{self.family.shared}" if shared else f"{module}.experts.{number}"
            names = _DENSE if shared else self.family.projections
            for dense, name, tensor in zip(_DENSE, names, own, strict=True):
                residual = self.family.residual if expert.residual_scale is None else expert.residual_scale
                scale = residual if dense == "down_proj" else 1.0
                yield _job(f"{place}.{name}.weight", dtype, str(expert.model), tensor, scale, expert.noise_scale)
        yield self._router(f"{module}.gate.weight", layer, 0, count, dtype)
        if self.family.correction_bias:
            yield self._given(f"{module}.gate.e_score_correction_bias", (count,), None)
        if self.family.shared_gate:
            name = f"{module}.{self.family.shared}_gate.weight"
            if any(expert.positive for expert in self.mixture.shared):
                yield self._router(name, layer, count, 1, dtype)
            else:
                yield self._given(name, (1, self.width), dtype)

    def _dense(self, expert: Expert, layer: int, problems: list[Finding]) -> list[AnyTensor]:
        """Gate, up and down projection of a layer; fewer where something is wrong with them."""
        found = []
        for part in _DENSE:
            name = f"{_STACK}.{layer}.mlp.{part}.weight"
            tensor = self.checkpoints[str(expert.model)].tensors.get(name)
            first = self.checkpoints[str(self.mixture.experts[0].model)].tensors.get(name)
            if tensor is None:
                problems.append(_missing(str(expert.model), name))
            elif first is not None and tensor.shape != first.shape:
                problems.append(
                    Finding(
                        "block",
                        f"{expert.model}: {name}",
                        found=f"shape {list(tensor.shape)}",
                        expected=f"{list(first.shape)}, as in {self.mixture.experts[0].model}",
                        remedy="make the mixture of models of one size",
                    )
                )
            elif tensor.dtype.kind != "float":
                problems.append(
                    Finding(
                        "block",
                        f"{expert.model}: {name}",
                        found=f"{tensor.dtype.code} numbers",
                        expected="bfloat16, float16, float32 or float64 weights",
                        remedy="use the unquantised model",
                    )
                )
            else:
                found.append(tensor)
        return found

    def _format(self, tensors: Sequence[AnyTensor]) -> DType | None:
        wanted = self.recipe.out_dtype or self.recipe.dtype
        floats = {tensor.dtype for tensor in tensors if tensor.dtype.kind == "float"}
        return wanted or (promote(floats) if floats else None)

    def _router(self, name: str, layer: int, first: int, count: int, dtype: DType) -> TensorJob:
        """Rows from prompts, or drawn."""
        shape, gates = (count, self.width), self.mixture.gates
        if not self.mixture.needs_prompts:
            # Drawn by the engine, as noise is: of zeros with noise remains the noise.
            uniform = self.mixture.gate_mode == "uniform_random"
            noise, draw = (self.width**-0.5, "uniform") if uniform else (1.0, "normal")
            return _job(name, dtype, _GIVEN, constant_tensor(name, shape), 1.0, noise, draw)
        if gates is None:  # A plan tells sizes before; the engine asks whether they are known.
            return _job(name, dtype, _GIVEN, constant_tensor(name, shape))
        return _job(name, dtype, _GIVEN, constant_tensor(name, shape, gates.of(layer, first, count)))

    def _given(self, name: str, shape: tuple[int, ...], dtype: DType | None) -> TensorJob:
        tensor = constant_tensor(name, shape)
        return _job(name, dtype or tensor.dtype, _GIVEN, tensor)


# What messages call the origin of tensors that no model has.
_GIVEN = "the recipe"


def _job(
    name: str,
    dtype: DType,
    reference: str,
    tensor: AnyTensor,
    scale: float = 1.0,
    noise: float = 0.0,
    draw: str = "normal",
) -> TensorJob:
    plain = scale == 1.0 and noise == 0.0
    return TensorJob(
        output=OutputTensor(name, dtype, tensor.shape),
        inputs=(Input(reference, tensor),),
        has_base=False,
        shared={},
        per_input=({"scale": scale, "noise": noise, "draw": draw},),
        mode="equal" if dtype.kind == "exact" else "copy" if plain else "merge",
    )


def _bulk(jobs: Sequence[TensorJob]) -> DType | None:
    sizes: dict[DType, int] = {}
    for job in jobs:
        if job.output.dtype.kind == "float":
            sizes[job.output.dtype] = sizes.get(job.output.dtype, 0) + job.output.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def _missing(reference: str, name: str) -> Finding:
    return Finding(
        "block",
        f"{reference}: {name}",
        found="missing",
        expected="every layer has it",
        remedy="make the mixture of models of one family and depth",
    )


def _misfits(
    reference: str, base: Checkpoint, mixture: Mixture, family: OutputFamily, checkpoints: Mapping[str, Checkpoint]
) -> Iterator[Finding]:
    """What a model has and the mixture has no place for, and models that do not compute alike."""
    for name in base.tensors:
        at = parse_layer_place(name)
        feed_forward = at is not None and at.part.startswith("mlp.")
        if at is None or is_optional(name) or feed_forward or (at.stack == _STACK and at.part in family.carried):
            continue
        yield _no_place(reference, name, family)
    for model in dict.fromkeys(str(expert.model) for expert in mixture.all_experts):
        checkpoint = checkpoints[model]
        for name in checkpoint.tensors:
            at = parse_layer_place(name)
            if at is not None and at.part.startswith("mlp.") and not _FEED_FORWARD.match(at.part):
                yield _no_place(model, name, family)
                break
        for key, default in (("hidden_act", "silu"), ("model_type", None), ("num_hidden_layers", None)):
            mine, theirs = base.config.get(key, default), checkpoint.config.get(key, default)
            same = theirs in family.sources if key == "model_type" else mine == theirs
            if not same:
                yield Finding(
                    "block",
                    f"{model}: config.json: {key}",
                    found=f"{theirs!r}",
                    expected=f"one of {', '.join(family.sources)}"
                    if key == "model_type"
                    else f"{mine!r}, as in {reference}",
                    remedy="make the mixture of models of one family and depth",
                )
    yield from _same_twice(mixture)
    if mixture.gates is not None:
        yield from _near_rows(mixture, mixture.gates)


def _near_rows(mixture: Mixture, gates: GateRows) -> Iterator[Finding]:
    """Layers where two experts have nearly one row: a token then goes to both of them, or to neither."""
    import numpy as np

    count = len(mixture.experts)
    near: dict[tuple[int, int], list[int]] = {}
    for layer in range(gates.layers):
        rows = np.frombuffer(gates.of(layer, 0, count), "<f4").reshape(count, gates.width).astype(np.float64)
        cosines = np.triu(rows @ rows.T, 1)
        for one, other in zip(*np.nonzero(cosines > _ALIKE), strict=True):
            near.setdefault((int(one), int(other)), []).append(layer)
    for (one, other), layers in list(near.items())[:_MOST_NEAR]:
        if mixture.experts[one].positive == mixture.experts[other].positive:
            continue  # That is said already.
        yield Finding(
            "warn",
            mixture.experts[other].where,
            found=f"in {len(layers)} of {gates.layers} layers nearly the router row of experts[{one}]",
            expected="prompts that the base tells apart, in every layer by their last tokens",
            remedy="let prompts end differently, or set gate_mode: hidden_avg",
        )


def _same_twice(mixture: Mixture) -> Iterator[Finding]:
    """Experts that no router can tell apart, or that are one."""
    seen: dict[tuple[Any, ...], Expert] = {}
    for expert in mixture.experts:
        asked = (expert.positive, expert.negative) if mixture.needs_prompts else (expert.where, expert.model)
        first = seen.setdefault(asked, expert)
        if first is expert or not mixture.needs_prompts:
            continue
        yield Finding(
            "warn",
            expert.where,
            found=f"the same prompts as {first.where.rpartition(': ')[2]}: two equal rows of the router",
            expected="prompts that tell experts apart",
            remedy="give each expert prompts of its own, or set gate_mode: random to let training tell them apart",
        )


def _no_place(reference: str, name: str, family: OutputFamily) -> Finding:
    return Finding(
        "block",
        f"{reference}: {name}",
        found=f"{family.name} has no such tensor",
        expected="models whose every tensor has a place",
        remedy="set architecture to a family that has it, or use other models",
    )
