"""Plan a mixture of experts: each output tensor is a tensor of one dense model, or a set of router rows.

Attention, norms, embeddings and head come from the base. Experts are the feed-forward layers of their models, to which
the recipe can apply noise and a scale. A finding reports each tensor of a model that the mixture should use but cannot.
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
from mergegate.merge_core.plan.jobs import Input, OutputTensor, TensorJob, bulk_dtype
from mergegate.merge_core.recipe import Expert, Mixture, Recipe

_FEED_FORWARD = re.compile(r"^mlp\.(?:gate_proj|up_proj|down_proj)\.weight$")
_STACK = "model.layers"
# Cosine of two unit rows above which they count as nearly the same row.
_NEAR_DUPLICATE = 0.999
_MAX_NEAR_PAIRS = 5
_DENSE = ("gate_proj", "up_proj", "down_proj")


def plan_mixture(
    recipe: Recipe, mixture: Mixture, checkpoints: Mapping[str, Checkpoint], problems: list[Finding]
) -> tuple[list[TensorJob], dict[str, Any]]:
    """Return the jobs and configuration of the mixture that ``recipe`` describes, and add findings to ``problems``."""
    reference = str(recipe.base)
    base = checkpoints[reference]
    source, prompts = str(base.config.get("model_type", "")), any(expert.positive for expert in mixture.shared)
    family = choose_output(
        mixture.output, source, shared=bool(mixture.shared), prompts=prompts, location=recipe.location
    )
    config = mixture_config(base.config, family, len(mixture.experts), mixture.per_token, reference)
    gates = mixture.gates
    expected_shape = (config["num_hidden_layers"], len(mixture.all_experts), config["hidden_size"])
    if gates is not None and (gates.layers, gates.rows, gates.width) != expected_shape:
        raise InvalidInput(
            f"{recipe.location}: router rows",
            found=f"[layers, rows, width] = {[gates.layers, gates.rows, gates.width]}",
            expected=f"{list(expected_shape)}, according to config.json of {reference} and the recipe",
        )
    problems += _mismatches(reference, base, mixture, family, checkpoints)
    builder = _Builder(recipe, mixture, family, checkpoints, base, config["num_hidden_layers"], config["hidden_size"])
    jobs = list(builder.jobs(problems))
    return jobs, with_dtype(config, bulk_dtype(jobs))


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
        """Yield all jobs, and stop after the first layer with a problem."""
        reference, problem_count = str(self.recipe.base), len(problems)
        for name, tensor in self.base.tensors.items():
            is_copied = ties_embeddings(self.base.config) is not True if is_head(name) else not is_optional(name)
            if parse_layer_place(name) is None and is_copied:
                yield self._copy_job(name, reference, tensor)
        for layer in range(self.layers):
            for part in self.family.carried:
                name = f"{_STACK}.{layer}.{part}"
                if (base_tensor := find_tensor(self.base, name)) is not None:
                    yield self._copy_job(name, reference, base_tensor)
                elif not (part.endswith(".bias") or "_norm." in part):
                    problems.append(_missing(reference, name))
            for part in ("q_proj", "k_proj", "v_proj") if self.family.biased else ():
                # The family has biases. They are zero if the base has none.
                name = f"{_STACK}.{layer}.self_attn.{part}"
                weight = self.base.tensors.get(f"{name}.weight")
                if weight is not None and f"{name}.bias" not in self.base.tensors:
                    yield self._constant_job(f"{name}.bias", weight.shape[:1], self._format([weight]))
            yield from self._feed_forward_jobs(layer, problems)
            if len(problems) > problem_count:  # A config may claim any number of layers.
                return

    def _copy_job(self, name: str, reference: str, tensor: AnyTensor) -> TensorJob:
        dtype = self.recipe.out_dtype or self.recipe.dtype or tensor.dtype
        return _job(name, dtype if tensor.dtype.kind == "float" else tensor.dtype, Input(reference, tensor))

    def _feed_forward_jobs(self, layer: int, problems: list[Finding]) -> Iterator[TensorJob]:
        module = f"{_STACK}.{layer}.{self.family.module}"
        tensors = [self._projections(expert, layer, problems) for expert in self.mixture.all_experts]
        if any(len(projections) < len(_DENSE) for projections in tensors):
            return
        sizes, config_sizes = tensors[0][0].shape, (self.base.config.get("intermediate_size"), self.width)
        if sizes != config_sizes:
            problem = Finding(
                "block",
                f"{self.recipe.base}: config.json: intermediate_size, hidden_size",
                found=f"{list(config_sizes)}",
                expected=f"{list(sizes)}, the shape of {tensors[0][0].name} in {self.mixture.experts[0].model}",
                remedy="use models of one size, or correct the config",
            )
            problems.append(problem)
            return
        dtype = self._format([tensor for projections in tensors for tensor in projections])
        if dtype is None:
            return
        count = len(self.mixture.experts)
        for number, (expert, expert_tensors) in enumerate(zip(self.mixture.all_experts, tensors, strict=True)):
            shared = number >= count
            prefix = f"{module}.{self.family.shared}" if shared else f"{module}.experts.{number}"
            names = _DENSE if shared else self.family.projections
            for dense, name, tensor in zip(_DENSE, names, expert_tensors, strict=True):
                residual = self.family.residual if expert.residual_scale is None else expert.residual_scale
                scale = residual if dense == "down_proj" else 1.0
                item = Input(str(expert.model), tensor)
                yield _job(f"{prefix}.{name}.weight", dtype, item, scale=scale, noise=expert.noise_scale)
        yield self._router_job(f"{module}.gate.weight", layer, 0, count, dtype)
        if self.family.correction_bias:
            yield self._constant_job(f"{module}.gate.e_score_correction_bias", (count,), None)
        if self.family.shared_gate:
            name = f"{module}.{self.family.shared}_gate.weight"
            if any(expert.positive for expert in self.mixture.shared):
                yield self._router_job(name, layer, count, 1, dtype)
            else:
                yield self._constant_job(name, (1, self.width), dtype)

    def _projections(self, expert: Expert, layer: int, problems: list[Finding]) -> list[AnyTensor]:
        """Return a layer's valid gate, up and down projections, and add a finding for each other to ``problems``."""
        projections = []
        for part in _DENSE:
            name = f"{_STACK}.{layer}.mlp.{part}.weight"
            tensor = self.checkpoints[str(expert.model)].tensors.get(name)
            first = self.checkpoints[str(self.mixture.experts[0].model)].tensors.get(name)
            if tensor is None:
                problems.append(_missing(str(expert.model), name))
                continue
            problem = None
            if first is not None and tensor.shape != first.shape:
                expected = f"{list(first.shape)}, as in {self.mixture.experts[0].model}"
                problem = f"shape {list(tensor.shape)}", expected, "use models of one size"
            elif tensor.dtype.kind != "float":
                expected = "bfloat16, float16, float32 or float64 weights"
                problem = f"{tensor.dtype.code} values", expected, "use the unquantized model"
            if problem is not None:
                problems.append(Finding("block", f"{expert.model}: {name}", *problem))
            else:
                projections.append(tensor)
        return projections

    def _format(self, tensors: Sequence[AnyTensor]) -> DType | None:
        chosen_dtype = self.recipe.out_dtype or self.recipe.dtype
        floats = {tensor.dtype for tensor in tensors if tensor.dtype.kind == "float"}
        return chosen_dtype or (promote(floats) if floats else None)

    def _router_job(self, name: str, layer: int, first: int, count: int, dtype: DType) -> TensorJob:
        """Return the job for router rows, which are computed from prompts or drawn at random."""
        shape, gates = (count, self.width), self.mixture.gates
        if not self.mixture.needs_prompts:
            # The engine draws the rows as noise: zeros plus noise are the noise.
            uniform = self.mixture.gate_mode == "uniform_random"
            noise, draw = (self.width**-0.5, "uniform") if uniform else (1.0, "normal")
            return _job(name, dtype, Input(_RECIPE_ORIGIN, constant_tensor(name, shape)), noise=noise, draw=draw)
        # A plan needs only sizes; the engine checks that the rows are available.
        values = gates.of(layer, first, count) if gates is not None else None
        return _job(name, dtype, Input(_RECIPE_ORIGIN, constant_tensor(name, shape, values)))

    def _constant_job(self, name: str, shape: tuple[int, ...], dtype: DType | None) -> TensorJob:
        tensor = constant_tensor(name, shape)
        return _job(name, dtype or tensor.dtype, Input(_RECIPE_ORIGIN, tensor))


# Origin, in messages, of tensors that come from no model.
_RECIPE_ORIGIN = "the recipe"


def _job(name: str, dtype: DType, item: Input, **changes: Any) -> TensorJob:
    """Return the job that copies ``item``, or applies ``scale`` and random ``noise`` from the distribution ``draw``."""
    values = {"scale": 1.0, "noise": 0.0, "draw": "normal", **changes}
    is_plain = values["scale"] == 1.0 and values["noise"] == 0.0
    return TensorJob(
        output=OutputTensor(name, dtype, item.tensor.shape),
        inputs=(item,),
        has_base=False,
        shared={},
        per_input=(values,),
        mode="equal" if dtype.kind == "exact" else "copy" if is_plain else "merge",
    )


def _missing(reference: str, name: str) -> Finding:
    return Finding(
        "block",
        f"{reference}: {name}",
        found="missing",
        expected="a tensor in every layer",
        remedy="use models of one family with the same number of layers",
    )


def _mismatches(
    reference: str, base: Checkpoint, mixture: Mixture, family: OutputFamily, checkpoints: Mapping[str, Checkpoint]
) -> Iterator[Finding]:
    """Yield findings for tensors that the mixture cannot use, and for models that compute differently from the base."""
    for name in base.tensors:
        at = parse_layer_place(name)
        feed_forward = at is not None and at.part.startswith("mlp.")
        if at is None or is_optional(name) or feed_forward or (at.stack == _STACK and at.part in family.carried):
            continue
        yield _unused_tensor(reference, name, family)
    for model in dict.fromkeys(str(expert.model) for expert in mixture.all_experts):
        checkpoint = checkpoints[model]
        for name in checkpoint.tensors:
            at = parse_layer_place(name)
            if at is not None and at.part.startswith("mlp.") and not _FEED_FORWARD.match(at.part):
                yield _unused_tensor(model, name, family)
                break
        for key, default in (("hidden_act", "silu"), ("model_type", None), ("num_hidden_layers", None)):
            base_value, value = base.config.get(key, default), checkpoint.config.get(key, default)
            same = value in family.sources if key == "model_type" else base_value == value
            if not same:
                yield Finding(
                    "block",
                    f"{model}: config.json: {key}",
                    found=f"{value!r}",
                    expected=f"one of {', '.join(family.sources)}"
                    if key == "model_type"
                    else f"{base_value!r}, as in {reference}",
                    remedy="use models of one family with the same number of layers",
                )
    yield from _duplicate_experts(mixture)


def _duplicate_experts(mixture: Mixture) -> Iterator[Finding]:
    """Yield a finding for experts that no router can tell apart: they have equal prompts or similar router rows."""
    first_by_key: dict[tuple[Any, ...], Expert] = {}
    for expert in mixture.experts if mixture.needs_prompts else ():
        first_expert = first_by_key.setdefault((expert.positive, expert.negative), expert)
        if first_expert is not expert:
            yield Finding(
                "warn",
                expert.location,
                found=f"the prompts are those of {first_expert.location.rpartition(': ')[2]}, so two rows of the "
                "router are equal",
                expected="different prompts for every expert",
                remedy="give each expert its own prompts, or set gate_mode: random to distinguish them by training",
            )
    if (gates := mixture.gates) is None:
        return
    import numpy as np

    count = len(mixture.experts)
    layers_by_pair: dict[tuple[int, int], list[int]] = {}
    for layer in range(gates.layers):
        rows = np.frombuffer(gates.of(layer, 0, count), "<f4").reshape(count, gates.width).astype(np.float64)
        cosines = np.triu(rows @ rows.T, 1)
        for first, second in zip(*np.nonzero(cosines > _NEAR_DUPLICATE), strict=True):
            layers_by_pair.setdefault((int(first), int(second)), []).append(layer)
    for (first, second), layers in list(layers_by_pair.items())[:_MAX_NEAR_PAIRS]:
        if mixture.experts[first].positive != mixture.experts[second].positive:
            yield Finding(
                "warn",
                mixture.experts[second].location,
                found=f"the router row is nearly that of experts[{first}] in {len(layers)} of {gates.layers} layers",
                expected="prompts whose last tokens the base distinguishes in every layer",
                remedy="end the prompts differently, or set gate_mode: hidden_avg",
            )


def _unused_tensor(reference: str, name: str, family: OutputFamily) -> Finding:
    return Finding(
        "block",
        f"{reference}: {name}",
        found=f"{family.name} has no such tensor",
        expected="a family that has all tensors of the models",
        remedy="set architecture to a family that has this tensor, or use other models",
    )
