"""What dense models can become: families of mixtures, as data, and the configuration of the result.

A family of mixtures says which dense families its attention computes alike, what its tensors are called, and whether it
has an expert that sees every token. All of them weigh the chosen experts so that the weights sum to one: experts that
are all equal then compute what the dense model computes. Where a shared expert is added to that sum, everything is
scaled down by default so that this stays so (``residual``).

Sources: transformers 5.23 and vLLM 0.32, the modelling files of each family.
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
    """A family of mixtures.

    Args:
        name: As a recipe's ``architecture`` begins.
        model_type: Of its configuration.
        architecture: Its class.
        sources: ``model_type`` of dense models whose attention it computes alike.
        module: What stands in a layer where the feed-forward part was.
        projections: Names of gate, up and down projection there.
        carried: Parts of a dense layer that it has under the same name.
        shared: Name of the expert that sees every token; empty for a family without.
        shared_gate: Whether a gate of its own weighs that expert.
        biased: Whether its query, key and value projections have biases (zeros, for a source without).
        correction_bias: Whether its router has a bias that only chooses.
        residual: Default factor of the down projections.
        says: What its configuration says beside sizes.
        sizes: Keys of: number of experts, their width, width of the shared expert.
    """

    name: str
    model_type: str
    architecture: str
    sources: tuple[str, ...]
    module: str
    projections: tuple[str, str, str]
    carried: tuple[str, ...]
    sizes: tuple[str, str | None, str | None]
    shared: str = ""
    shared_gate: bool = False
    biased: bool = False
    correction_bias: bool = False
    residual: float = 1.0
    says: Mapping[str, Any] = field(default_factory=dict)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# In the order in which they are tried.
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
        says={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
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
        residual=1 / 2,  # The chosen ones and the shared one are added.
        says={
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
        residual=2 / 3,  # Without prompts its gate is open by half: 1 + 1/2.
        says={
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "qkv_bias": True,
        },
    ),
)
_ALSO_CALLED = {"qwen2moe": "qwenmoe", "glm4moe": "glm4moe"}

# What a configuration means where it says nothing: the families' own defaults, which those of mixtures are not.
_UNSAID: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
_UNSAID_BY_TYPE: Mapping[str, Mapping[str, Any]] = {
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
# Keys that mean something else, or nothing, in the result.
_DROPPED = (
    "attention_bias", "head_dim", "layer_types", "max_window_layers", "mlp_bias", "pretraining_tp", "sliding_window",
    "use_sliding_window",
)  # fmt: skip


def choose_output(wanted: str | None, source: str, *, shared: bool, prompts: bool, where: str) -> OutputFamily:
    """The family that dense models become.

    Args:
        wanted: ``architecture`` of the recipe: how its name begins; None: the first that fits.
        source: ``model_type`` of the base.
        shared: Whether there is a shared expert.
        prompts: Whether it has prompts, which only a gate of its own can follow.
        where: Place of the recipe.

    Raises:
        InvalidInput: No family of that name, or none that fits.
    """
    fitting = [
        family
        for family in OUTPUT_FAMILIES
        if source in family.sources and bool(family.shared) == shared and (family.shared_gate or not prompts)
    ]
    if wanted is None:
        if fitting:
            return fitting[0]
        raise InvalidInput(
            where,
            found=f"a {source or 'nameless'} base {'with' if shared else 'without'} a shared expert",
            expected="; ".join(_described(family) for family in OUTPUT_FAMILIES),
            remedy=_remedy(source, shared),
        )
    named = [family for family in OUTPUT_FAMILIES if _plain(family.name).startswith(_asked(wanted))]
    if not named or not wanted.strip():
        deepseek = _plain(wanted).startswith("deepseek")
        raise InvalidInput(
            f"{where}: architecture",
            found=f"{wanted!r:.60}",
            expected=f"the beginning of {', '.join(family.name for family in OUTPUT_FAMILIES)}",
            remedy=(
                "GLM-4 MoE computes the same from the same models, and needs no code of its own"
                if deepseek
                else "leave it out to take the first that fits"
            ),
        )
    if both := [family for family in named if family in fitting]:
        return both[0]
    raise InvalidInput(
        f"{where}: architecture",
        found=f"{named[0].name}, of a {source or 'nameless'} base {'with' if shared else 'without'} a shared expert",
        expected=_described(named[0]),
        remedy=f"leave architecture out: {fitting[0].name} fits" if fitting else _remedy(source, shared),
    )


def mixture_config(
    base: Mapping[str, Any], family: OutputFamily, experts: int, per_token: int, where: str
) -> dict[str, Any]:
    """The configuration of the mixture, with everything said that the base's leaves to its own family's defaults.

    Args:
        base: Configuration of the base, of one of the family's sources.
        family: What it becomes.
        experts: How many are chosen among.
        per_token: How many see a token.
        where: What messages call the base.

    Raises:
        InvalidInput: A configuration that lacks a size, or of which the family cannot compute the attention.
    """
    kind = str(base.get("model_type", ""))
    if base.get("auto_map"):
        raise _misfit(where, "auto_map", "code of its own", "a model that transformers knows")
    unsaid = {**_UNSAID, **_UNSAID_BY_TYPE[kind]}
    said = {key: value for key, value in base.items() if value is not None}
    full = {**unsaid, **said}
    full.setdefault("num_key_value_heads", full.get("num_attention_heads"))
    for key in (*_SIZES, *(["head_dim"] if "head_dim" in full else [])):
        if type(full.get(key)) is not int or full[key] < 1:
            raise _misfit(where, key, f"{full.get(key)!r:.40}", "a whole number, from 1")
    heads = full["num_attention_heads"]
    head_dim = full.get("head_dim", full["hidden_size"] // heads)
    window = _window(base, kind, full, where)
    if window is not None and family.model_type != "mixtral":
        raise _misfit(where, "sliding_window", f"{window}", f"full attention: {family.name} has no such window")
    if family.biased and head_dim * heads != full["hidden_size"]:
        raise _misfit(where, "head_dim", f"{head_dim}", f"hidden_size / num_attention_heads: servers of {family.name}")
    config: dict[str, Any] = {key: copy.deepcopy(value) for key, value in full.items() if key not in _DROPPED}
    number, width, shared_width = family.sizes
    config |= copy.deepcopy(dict(family.says))
    config |= {"model_type": family.model_type, "architectures": [family.architecture], "head_dim": head_dim}
    config |= {number: experts, "num_experts_per_tok": per_token}
    if family.model_type == "mixtral":
        config["sliding_window"] = window
    if family.model_type == "qwen3_moe":
        config["attention_bias"] = bool(full.get("attention_bias", False))
    for said_as in (width, shared_width):
        if said_as is not None:
            config[said_as] = full["intermediate_size"]
    if not config.get("rope_parameters"):
        config.setdefault("rope_theta", _ROPE_THETA)
    if "partial_rotary_factor" in family.says:
        config["rope_parameters"] = {**_rope(config), "partial_rotary_factor": 1.0}
        config.pop("rope_scaling", None)
    return config


def _window(base: Mapping[str, Any], kind: str, full: Mapping[str, Any], where: str) -> int | None:
    """How far back attention sees in every layer; None: everything.

    Raises:
        InvalidInput: It is not the same in every layer.
    """
    if kind in ("qwen2", "qwen3"):
        kinds = base.get("layer_types")
        limited = base.get("use_sliding_window") is True
        if isinstance(kinds, list):
            limited = any(layer != "full_attention" for layer in kinds)
        if limited:
            raise _misfit(where, "use_sliding_window", "true", "full attention in every layer")
        return None
    if kind != "mistral":
        return None
    # Said to be null is said.
    window = base["sliding_window"] if "sliding_window" in base else full.get("sliding_window")
    return window if type(window) is int and window < full["max_position_embeddings"] else None


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings in the form of transformers 5, from whichever form they are said in."""
    said = config.get("rope_parameters")
    if isinstance(said, Mapping) and said:
        return dict(said)
    scaling = config.get("rope_scaling")
    older = dict(scaling) if isinstance(scaling, Mapping) else {}
    kind = older.pop("type", None)
    return {"rope_theta": config.get("rope_theta", _ROPE_THETA), "rope_type": kind or "default", **older}


def _misfit(where: str, key: str, found: str, expected: str) -> InvalidInput:
    return InvalidInput(
        f"{where}: config.json: {key}", found=found, expected=expected, remedy="make the mixture of other models"
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _asked(name: str) -> str:
    plain = _plain(name)
    return _ALSO_CALLED.get(plain.removesuffix("forcausallm"), plain)


def _described(family: OutputFamily) -> str:
    return f"{family.name} from {', '.join(family.sources)} with {'one' if family.shared else 'no'} shared expert"


def _remedy(source: str, shared: bool) -> str:
    if any(source in family.sources and bool(family.shared) != shared for family in OUTPUT_FAMILIES):
        return "remove shared_experts" if shared else "add one model under shared_experts"
    return "make the mixture of models of one of these families"
