"""Plan a mixture of experts: choose its family, write its configuration, and list the job of each output tensor.

Each output tensor is a tensor of one dense model, or a set of router rows. Attention, norms, embeddings and head come
from the base. Experts are the feed-forward layers of their models, to which the recipe can apply noise and a scale. A
finding reports each tensor of a model that the mixture should use but cannot.

In all families (``mixtures.json``), the weights of the chosen experts sum to one. If all experts are equal, the mixture
therefore computes the same as the dense model. A shared expert, which sees every token, adds to that sum, so all
experts are then scaled down by default to preserve this property (``residual``). Sources: the modeling files of each
family in transformers 5.23 and vLLM 0.32.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mergegate.merge_core.architecture import (
    family_defaults,
    find_tensor,
    is_head,
    is_optional,
    packaged_table,
    parse_layer_place,
    ties_embeddings,
    with_dtype,
)
from mergegate.merge_core.architecture.experts import constant_tensor
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


@dataclass(frozen=True)
class OutputFamily:
    """Family of mixtures of experts."""

    # Name of the family. A recipe's ``architecture`` is a prefix of it.
    name: str
    model_type: str  # ``model_type`` of the family's configuration
    architecture: str  # class name of the family's models
    sources: tuple[str, ...]  # ``model_type`` of each dense family that computes attention in the same way
    module: str  # name of the module that replaces the feed-forward network of a layer
    projections: tuple[str, str, str]  # names of the gate, up and down projections in that module
    carried: tuple[str, ...]  # tensors of a dense layer that are copied under the same name
    # Keys for the number of experts, their width, and the width of the shared expert.
    sizes: tuple[str, str | None, str | None]
    shared: str = ""  # name of the shared expert, or an empty string for a family without one
    shared_gate: bool = False  # whether the shared expert has its own gate
    # Whether the query, key and value projections have biases. They are zero for a source without biases.
    biased: bool = False
    correction_bias: bool = False  # whether the router has a bias that affects only the choice of experts
    # Default factor by which the down projections of all experts are multiplied. It is 1/2 if the outputs of the chosen
    # experts and of the shared expert are added. Without prompts, the gate of a shared expert is half open: 2/3.
    residual: float = 1.0
    # Fixed settings of the family's configuration, other than sizes.
    settings: Mapping[str, Any] = field(default_factory=dict)


def _read_family(entry: dict[str, Any]) -> OutputFamily:
    content: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return OutputFamily(**content)


# In order of preference.
OUTPUT_FAMILIES = tuple(map(_read_family, packaged_table("mixtures.json")))
_ALIASES = {"qwen2moe": "qwenmoe"}
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
# Sizes with a default in the dense families. The mixture families have other defaults.
_USUAL_SIZES = ("max_position_embeddings", "num_key_value_heads", "head_dim", "sliding_window")
_ROPE_THETA = 10000.0
# Keys that have another meaning, or none, in the mixture.
_DROPPED = (
    "attention_bias", "head_dim", "layer_types", "max_window_layers", "mlp_bias", "pretraining_tp", "sliding_window",
    "use_sliding_window",
)  # fmt: skip


def choose_output(architecture: str | None, source: str, *, shared: bool, prompts: bool, location: str) -> OutputFamily:
    """Return the family of a mixture whose base has the ``model_type`` ``source``.

    ``architecture`` is a prefix of the family's name. None selects the first suitable family. ``shared`` states whether
    the mixture has a shared expert, and ``prompts`` whether the recipe has prompts for it, which require its own gate.

    Raises:
        InvalidInput: No family has this name, or none is suitable.
    """
    fitting = [
        family
        for family in OUTPUT_FAMILIES
        if source in family.sources and bool(family.shared) == shared and (family.shared_gate or not prompts)
    ]
    base, parts = f"a base of type {source or 'unknown'}", f"{'with' if shared else 'without'} a shared expert"
    remedy = "use models of one of these families"
    if any(source in family.sources and bool(family.shared) != shared for family in OUTPUT_FAMILIES):
        remedy = "remove shared_experts" if shared else "add one model under shared_experts"
    if architecture is None:
        if fitting:
            return fitting[0]
        expected = "; ".join(_describe(family) for family in OUTPUT_FAMILIES)
        raise InvalidInput(location, found=f"{base} {parts}", expected=expected, remedy=remedy)
    wanted_name = _plain(architecture).removesuffix("forcausallm")
    wanted_name = _ALIASES.get(wanted_name, wanted_name)
    matches = [family for family in OUTPUT_FAMILIES if wanted_name and _plain(family.name).startswith(wanted_name)]
    if not matches:
        raise InvalidInput(
            f"{location}: architecture",
            found=f"{architecture!r:.60}",
            expected=f"a prefix of {', '.join(family.name for family in OUTPUT_FAMILIES)}",
            remedy="use GLM-4 MoE, which computes the same from the same models and needs no custom code"
            if _plain(architecture).startswith("deepseek")
            else "remove the key to use the first suitable family",
        )
    if fitting_matches := [family for family in matches if family in fitting]:
        return fitting_matches[0]
    raise InvalidInput(
        f"{location}: architecture",
        found=f"{matches[0].name} for {base}, {parts}",
        expected=_describe(matches[0]),
        remedy=f"remove architecture: {fitting[0].name} is suitable" if fitting else remedy,
    )


def mixture_config(
    base: Mapping[str, Any], family: OutputFamily, experts: int, per_token: int, location: str
) -> dict[str, Any]:
    """Return the configuration of a mixture of ``experts`` experts, ``per_token`` of which process each token.

    Settings that ``base`` leaves to its family's defaults are written out, because the mixture's family has others.
    """
    kind = str(base.get("model_type", ""))
    if base.get("auto_map"):
        raise _misfit(location, "auto_map", "the model has custom code", "a model that transformers supports")
    usual = family_defaults(kind)
    assert usual is not None  # The families of OUTPUT_FAMILIES are known.
    full: dict[str, Any] = {key: usual.values[key] for key in ("hidden_act", "rms_norm_eps")}
    full |= {"tie_word_embeddings": False, "attention_dropout": 0.0, "initializer_range": 0.02}
    full |= {key: usual.values[key] for key in _USUAL_SIZES if usual.values.get(key) is not None}
    full |= {"bos_token_id": 1, "eos_token_id": 2} if kind in ("llama", "mistral") else {}
    full |= {key: value for key, value in base.items() if value is not None}
    full.setdefault("num_key_value_heads", full.get("num_attention_heads"))
    for key in (*_SIZES, *(["head_dim"] if "head_dim" in full else [])):
        if type(full.get(key)) is not int or full[key] < 1:
            raise _misfit(location, key, f"{full.get(key)!r:.40}", "a whole number of at least 1")
    heads = full["num_attention_heads"]
    head_dim = full.get("head_dim", full["hidden_size"] // heads)
    window = _window(base, kind, full, location)
    if window is not None and family.model_type != "mixtral":
        raise _misfit(location, "sliding_window", f"{window}", f"full attention: {family.name} has no sliding window")
    if family.biased and head_dim * heads != full["hidden_size"]:
        raise _misfit(
            location,
            "head_dim",
            f"{head_dim}",
            f"hidden_size / num_attention_heads, as servers of {family.name} require",
        )
    config: dict[str, Any] = {key: copy.deepcopy(value) for key, value in full.items() if key not in _DROPPED}
    number, width, shared_width = family.sizes
    config |= copy.deepcopy(dict(family.settings))
    config |= {"model_type": family.model_type, "architectures": [family.architecture], "head_dim": head_dim}
    config |= {number: experts, "num_experts_per_tok": per_token}
    if family.model_type == "mixtral":
        config["sliding_window"] = window
    if family.model_type == "qwen3_moe":
        config["attention_bias"] = bool(full.get("attention_bias", False))
    for width_key in (width, shared_width):
        if width_key is not None:
            config[width_key] = full["intermediate_size"]
    if not config.get("rope_parameters"):
        config.setdefault("rope_theta", _ROPE_THETA)
    if "partial_rotary_factor" in family.settings:  # Write rotary positions in the form of transformers 5.
        rope, scaling = config.get("rope_parameters"), config.pop("rope_scaling", None)
        if not (isinstance(rope, Mapping) and rope):
            older = dict(scaling) if isinstance(scaling, Mapping) else {}
            rope_type = older.pop("type", None) or "default"
            rope = {"rope_theta": config.get("rope_theta", _ROPE_THETA), "rope_type": rope_type, **older}
        config["rope_parameters"] = {**rope, "partial_rotary_factor": 1.0}
    return config


def _window(base: Mapping[str, Any], kind: str, full: Mapping[str, Any], location: str) -> int | None:
    """Return the attention window of all layers in tokens, or None for full attention."""
    if kind in ("qwen2", "qwen3"):
        kinds = base.get("layer_types")
        has_windows = base.get("use_sliding_window") is True
        if isinstance(kinds, list):
            has_windows = any(layer != "full_attention" for layer in kinds)
        if has_windows:
            raise _misfit(location, "use_sliding_window", "true", "full attention in every layer")
        return None
    if kind != "mistral":
        return None
    # An explicit null takes precedence over the default.
    window = base["sliding_window"] if "sliding_window" in base else full.get("sliding_window")
    return window if type(window) is int and window < full["max_position_embeddings"] else None


def _misfit(location: str, key: str, found: str, expected: str) -> InvalidInput:
    return InvalidInput(
        f"{location}: config.json: {key}", found=found, expected=expected, remedy="use other models for the mixture"
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _describe(family: OutputFamily) -> str:
    return f"{family.name} from {', '.join(family.sources)} with {'one' if family.shared else 'no'} shared expert"
