"""List the mixture families that dense models can be merged into, and write the configuration of the mixture.

In all families, the weights of the chosen experts sum to one. If all experts are equal, the mixture therefore computes
the same as the dense model. A shared expert, which sees every token, adds to that sum, so all experts are then scaled
down by default to preserve this property (``residual``).

Sources: the modeling files of each family in transformers 5.23 and vLLM 0.32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mergegate.merge_core.errors import InvalidInput

_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
_QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


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
    residual: float = 1.0  # default factor by which the down projections of all experts are multiplied
    # Fixed settings of the family's configuration, other than sizes.
    settings: Mapping[str, Any] = field(default_factory=dict)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# In order of preference.
OUTPUT_FAMILIES = (
    OutputFamily(
        name="Mixtral",
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        sources=("llama", "mistral"),
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        carried=(*_NORMS, *_ATTENTION),
        sizes=("num_local_experts", None, None),
    ),
    OutputFamily(
        name="Qwen3 MoE",
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        sources=("qwen3",),
        module="mlp",
        projections=_PROJECTIONS,
        carried=(*_NORMS, *_ATTENTION, *_BIASES, "self_attn.o_proj.bias", *_QK_NORMS),
        sizes=("num_experts", "moe_intermediate_size", None),
        settings={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
    OutputFamily(
        name="GLM-4 MoE",
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        sources=("llama", "mistral"),
        module="mlp",
        projections=_PROJECTIONS,
        carried=(*_NORMS, *_ATTENTION),
        sizes=("n_routed_experts", "moe_intermediate_size", None),
        shared="shared_experts",
        correction_bias=True,
        residual=1 / 2,  # The outputs of the chosen experts and of the shared expert are added.
        settings={
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "attention_bias": False,
            "partial_rotary_factor": 1.0,
        },
    ),
    OutputFamily(
        name="Qwen MoE",
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        sources=("qwen2", "llama", "mistral"),
        module="mlp",
        projections=_PROJECTIONS,
        carried=(*_NORMS, *_ATTENTION, *_BIASES),
        sizes=("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
        shared="shared_expert",
        shared_gate=True,
        biased=True,
        residual=2 / 3,  # Without prompts, the gate of the shared expert is half open: 1 + 1/2.
        settings={
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "qkv_bias": True,
        },
    ),
)
_ALIASES = {"qwen2moe": "qwenmoe"}

# Defaults of the dense families for missing keys. The mixture families have other defaults.
_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
_DEFAULTS_BY_TYPE: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
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
    defaults = {**_DEFAULTS, **_DEFAULTS_BY_TYPE[kind]}
    stated = {key: value for key, value in base.items() if value is not None}
    full = {**defaults, **stated}
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
