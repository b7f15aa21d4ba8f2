"""Compare the settings in ``config.json`` that, together with the weights, determine what a network computes.

Every key counts, also an unknown one, unless it matches :data:`_NO_EFFECT`: names, versions, number formats, dropout,
initialization, training losses, text generation. Alternative spellings are unified (``rope_theta`` and
``rope_scaling`` with ``rope_parameters``, ``n_embd`` with ``hidden_size``). A missing key has the default of its family
from ``defaults.json``, which ``tests/merge_core/test_meaning.py`` generates from transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mergegate.merge_core.architecture.families import FamilyDefaults, TextPart, family_defaults, layer_kinds, text_part
from mergegate.merge_core.architecture.structure import LAYER_COUNT_KEYS, layer_count
from mergegate.merge_core.errors import InvalidInput

_NO_EFFECT = re.compile(
    # Names, files and number formats.
    r"^_|^(?:architectures|auto_map|model_type|dtype|torch_dtype|quantization_config|torchscript|use_bfloat16"
    r"|task_specific_params|finetuning_task|tokenizer_class)$"
    r"|(?:^|_)version$|unsloth|attn_implementation|flash_attn|(?:model|run|tokenizer|dataset)_name$|_name_or_path$"
    # Labels and the vocabulary, which other code checks.
    r"|^(?:id2label|label2id|num_labels|vocab_size|unpadded_vocab_size|tie_word_embeddings)$"
    r"|_token_ids?$|_token_index$|_token_indices$"
    # Training. The names that are excluded here are read when the network computes.
    r"|dropout|drop_?(?:rate|path|connect|conv|mlp)|layerdrop|_pdrop$|initializer|init_std|init_scheme|loss|jitter"
    r"|^(?:ctc_zero_infinity|apply_spec_augment|mask_(?:time|feature)_\w+|sparse_pred\w*|use_mems_train|no_object_weight"
    r"|box_noise_scale|label_noise_ratio|importance_sample_ratio|oversample_ratio|pos_embed_(?:rescale|shift))$"
    r"|^(?!embedding_init_target$|inv_coeff_init_option$|init_trk_)(?:.*_)?init_"
    r"|gradient_checkpointing|rescale_prenorm_residual"
    # How the library runs, not what it computes.
    r"|^output_(?:attentions|(?:hidden_|past_)?(?:states|past)|(?:router_|auxiliary_)?logits|scores|retrieved|segmentation)$"
    r"|^return_dict|^use_(?:cache|mamba_kernels|mambapy|associative_scan|mem_eff_path)$|^num_logits_to_keep$"
    r"|^is_encoder_decoder$|^residual_in_fp32$|^(?:mamba_)?chunk_size$"
    r"|^(?:chunk_size_feed_forward|pretraining_tp|slow_but_exact|reorder_and_upcast_attn|pruned_heads)$"
    # Maximum lengths. If they affect the positions, _rope_settings includes them.
    r"|^(?:max_position_embeddings|original_max_position_embeddings|n_positions|n_ctx|max_seq_len|max_length"
    r"|model_max_length|max_sequence_length|seq_length)$"
    # Text generation, which older configurations contain.
    r"|^(?:do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_[kp]|typical_p"
    r"|(?:repetition|length|exponential_decay_length)_penalty|(?:encoder_)?no_repeat_ngram_size|bad_words_ids"
    r"|num_return_sequences|remove_invalid_values|(?:begin_)?suppress_tokens|min_length)$"
)
# What the outputs of a classifier mean, in the code of its head and in pipelines.
_LABELS = "id2label"
_HEAD = re.compile(
    rf"^(?:.*pooling(?:_type|_mode|_strategy|_method)?|{_LABELS}|problem_type|summary_(?:type|use_proj|activation|proj_to_labels))$"
)
# Rotary positions are compared as a whole, see _rope_settings. The later spellings are those of older configurations.
_THETA_KEYS = ("rope_theta", "rotary_emb_base", "global_rope_theta")
_LOCAL_THETA_KEYS = ("rope_local_base_freq", "local_rope_theta")
_PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct", "rope_pct")
_ROPE_KEYS = frozenset(("rope_scaling", "rope_parameters", *_THETA_KEYS, *_LOCAL_THETA_KEYS, *_PARTIAL_KEYS))
_ROPE_TYPES = {"su": "longrope", "mrope": "default", "axial": "default"}
# Parameters that only scaled rotary positions have, with their defaults.
_SCALING: Mapping[str, Any] = {
    "factor": None,
    "attention_factor": None,
    "low_freq_factor": None,
    "high_freq_factor": None,
    "short_factor": None,
    "long_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "original_max_position_embeddings": None,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
}
_LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")
_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
# Alternative names of activation functions.
_ACTIVATIONS = {
    "swish": "silu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), "gelu_pytorch_tanh"),
}
# Limit for comparing layers one by one. No network has more layers.
_MOST_LAYERS = 2000


@dataclass(frozen=True)
class ModelSetting:
    """Setting of a configuration."""

    key: str  # key in ``config.json``, such as ``text_config.sliding_window``
    value: Any  # value in its standard spelling
    # Origin of the value: ``stated`` in the file, ``default`` of the family, ``derived`` from other keys by the family,
    # or ``missing``.
    source: str = "stated"
    # Whether the family reads the key. True if this is not known.
    is_read: bool = True

    @property
    def is_of_head(self) -> bool:
        """Whether the setting decides what the outputs of a classifier mean."""
        return _HEAD.search(self.key) is not None

    @property
    def is_of_positions(self) -> bool:
        """Whether the setting decides how positions are rotated."""
        return not _ROPE_KEYS.isdisjoint(self.key.split("."))

    def __str__(self) -> str:
        if self.source in ("derived", "missing"):
            return "not set"
        text = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"{text:.200}" + (" (the default)" if self.source == "default" else "")


def has_effect(key: str) -> bool:
    """Return whether a key of ``config.json`` may change what a network computes."""
    return not _NO_EFFECT.search(key) and key not in LAYER_COUNT_KEYS


def differing_settings(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[tuple[ModelSetting, ModelSetting]]:
    """Yield each setting with different values in two configurations of one architecture, as a pair."""
    first_settings, second_settings = settings(first), settings(second)
    for name in {**first_settings, **second_settings}:
        present = first_settings.get(name) or second_settings[name]
        missing = ModelSetting(present.key, None, "missing", present.is_read)
        first_setting, second_setting = first_settings.get(name, missing), second_settings.get(name, missing)
        stated = first_setting if second_setting is missing else second_setting
        values = (first_setting.value, second_setting.value)
        is_equal = values[0] == values[1] or repr(values[0]) == repr(values[1])
        if missing in (first_setting, second_setting):
            is_equal |= stated.value in (None, False)
        if name == _LABELS:
            is_equal = not _contradicts(values[0] or {}, values[1] or {})
        elif name == "problem_type":  # Training with classes as integers sets the usual value.
            is_equal |= set(map(str, values)) == {"None", "single_label_classification"}
        if not is_equal:
            yield first_setting, second_setting


def settings(config: Mapping[str, Any]) -> dict[str, ModelSetting]:
    """Return the settings in ``config`` that may change what the network computes, by name.

    The names of the language model's settings have no prefix, even if the file contains them under ``text_config``.
    """
    part = text_part(config)
    defaults = family_defaults(part.model_type)
    if config.get("auto_map"):
        defaults = None  # The checkpoint's own code may read any key.
    container: dict[str, ModelSetting] = {}
    if part.key is not None:
        outer = {key: value for key, value in config.items() if key != part.key}
        container = _part_settings(TextPart(None, outer, None), None, "")
    if isinstance(labels := config.get(_LABELS), Mapping):
        container[_LABELS] = ModelSetting(_LABELS, {str(number): str(name) for number, name in labels.items()})
    return {**container, **_part_settings(part, defaults, f"{part.key}." if part.key is not None else "")}


def _contradicts(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Return whether two classifiers name outputs differently. Automatic names such as ``LABEL_0`` say nothing."""
    names, others = (
        {
            number: re.sub(r"[\W_]+", "", name).casefold() or name
            for number, name in labels.items()
            if not re.fullmatch(rf"(?i:label_?)?{re.escape(number)}", name)
        }
        for labels in (first, second)
    )
    return any(names[number] != others[number] for number in names.keys() & others.keys())


def _part_settings(part: TextPart, defaults: FamilyDefaults | None, prefix: str) -> dict[str, ModelSetting]:
    config, family = part.config, defaults or FamilyDefaults()
    skipped = set(_ROPE_KEYS)
    if part.family is not None and part.family.refused is None:
        # merge_core.plan.consistency compares the keys that only determine the kinds of single layers, layer by layer.
        conditions = [condition for kind in part.family.kinds for clause in kind.rule for condition in clause.when]
        skipped |= set(part.family.keys) - {condition.enabled for condition in conditions}
    result: dict[str, ModelSetting] = {}
    for key, value in config.items():
        name = family.names.get(key, key)
        if not has_effect(key) or not has_effect(name) or key in skipped or name in skipped:
            continue
        is_read = defaults is None or name in family.values
        if isinstance(value, Mapping):
            inner = TextPart(None, value, None)
            nested = _part_settings(inner, family_defaults(value.get("model_type")), f"{prefix}{key}.")
            result |= {f"{key}.{inner_name}": setting for inner_name, setting in nested.items()}
        else:
            result[name] = ModelSetting(prefix + key, _standard_spelling(value), is_read=is_read)
    for key, value in family.values.items():
        if key not in skipped and has_effect(key):
            source = "derived" if key in family.derived else "default"
            result.setdefault(key, ModelSetting(prefix + key, _standard_spelling(value), source))
    sizes = {name: setting.value for name, setting in result.items()}
    heads, width = sizes.get("num_attention_heads"), sizes.get("hidden_size")
    if (defaults is None or "num_attention_heads" in family.values) and type(heads) is int and heads >= 1:
        # Add the attention sizes that follow from other settings.
        if sizes.get("num_key_value_heads") is None:
            result["num_key_value_heads"] = ModelSetting(f"{prefix}num_key_value_heads", heads, "default")
        if sizes.get("head_dim") is None and type(width) is int:
            result["head_dim"] = ModelSetting(f"{prefix}head_dim", width // heads, "default")
    _apply_window_flag(result, part, defaults)
    return result | _rope_settings(config, defaults, prefix)


def _standard_spelling(value: Any) -> Any:
    if isinstance(value, str):
        return _ACTIVATIONS.get(value, value)
    return None if value == [] else value


def _apply_window_flag(result: dict[str, ModelSetting], part: TextPart, defaults: FamilyDefaults | None) -> None:
    """Set the attention window to null if the configuration shows that no layer uses it."""
    flag, window = result.pop("use_sliding_window", None), result.get("sliding_window")
    if window is None or window.value is None:
        return
    is_off = flag is not None and flag.is_read and not flag.value
    list_keys = {kind.listed_in for kind in part.family.kinds} if part.family is not None else set()
    reads_layer_types = "layer_types" in list_keys or (defaults is not None and "layer_types" in defaults.values)
    stated_kinds = part.config.get("layer_types")
    kinds: list[Any] = stated_kinds if isinstance(stated_kinds, list) else []
    if not kinds and reads_layer_types and not is_off:
        depth = min(layer_count(part.config) or 0, _MOST_LAYERS)
        try:
            layers = [layer_kinds(part, index, depth, "config.json") for index in range(depth)]
        except InvalidInput:
            return
        if not any("attention" in layer for layer in layers):
            return
        kinds = [layer["attention"] for layer in layers]
    has_windows = any(re.search("sliding|local|chunk|hybrid", str(kind)) for kind in kinds)
    if is_off or (reads_layer_types and not has_windows):
        result["sliding_window"] = replace(window, value=None)


def _rope_settings(config: Mapping[str, Any], defaults: FamilyDefaults | None, prefix: str) -> dict[str, ModelSetting]:
    """Return the base frequency, rotated fraction and scaling of rotary positions, by layer type if they differ."""
    usual = defaults.rope if defaults is not None else None
    if usual is None and not any(config.get(key) is not None for key in _ROPE_KEYS):
        return {}
    default_values = defaults.values if defaults is not None else {}
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    value = config.get(source) or {}
    # Only the top level and the text part are known to have valid types. Elsewhere, compare any other value as it is.
    stated = value if isinstance(value, Mapping) else {"value": value}
    groups = {key: value for key, value in stated.items() if isinstance(value, Mapping)}
    usual_groups = {key: value for key, value in (usual or {}).items() if isinstance(value, Mapping)}
    result: dict[str, ModelSetting] = {}
    for label in usual_groups or groups or [""]:
        default = usual_groups.get(label, {}) if usual_groups else usual or {}
        is_local = bool(usual_groups) and "sliding" in label
        # Scaling without a layer type applies to the layers with full attention.
        own = groups.get(label, {}) if groups else {} if is_local and source == "rope_scaling" else stated
        path = f"{prefix}{source}.{label}." if label in groups else f"{prefix}{source}."
        for name, spellings, value in (
            ("rope_theta", _LOCAL_THETA_KEYS if is_local else _THETA_KEYS, default.get("rope_theta")),
            ("partial_rotary_factor", _PARTIAL_KEYS, default.get("partial_rotary_factor", 1.0)),
        ):
            outer = next((key for key in spellings if config.get(key) is not None), None)
            if own.get(name) is not None:
                setting = ModelSetting(path + name, own[name])
            elif outer is not None:
                setting = ModelSetting(prefix + outer, config[outer])
            else:
                setting = ModelSetting(prefix + name, value, "missing" if value is None else "default")
            result[f"{name} {label}"] = setting
        is_stated = bool(own.keys() - {"rope_theta", "partial_rotary_factor"}) or "rope_scaling" in config
        key = path.rstrip(".") if own else f"{prefix}rope_scaling"
        # The scaling consists of its type and the parameters that the type reads.
        rope = own if "type" in own else {**default, **own}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        kind = _ROPE_TYPES.get(kind, kind) if isinstance(kind, str) else kind
        ignored = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(_SCALING if kind == "default" else ())}
        values = {key: value for key, value in rope.items() if key not in ignored and value is not None}
        values = {key: value for key, value in values.items() if _SCALING.get(key) != value}
        length, original = (config.get(key) or default_values.get(key) for key in _LENGTHS)
        if kind in _WITH_ORIGINAL_LENGTH:
            if _LENGTHS[1] in default_values:
                values[_LENGTHS[1]] = original  # These families read the key outside the parameters.
            values.setdefault(_LENGTHS[1], original or length)
        if kind == "dynamic" or (kind in ("yarn", "longrope") and "factor" not in values):
            values[_LENGTHS[0]] = length
        scaling = {"rope_type": kind, **dict(sorted(values.items()))}
        result[f"rope_scaling {label}"] = ModelSetting(key, scaling, "stated" if is_stated else "default")
    is_read = defaults is None or usual is not None
    return {name: replace(setting, is_read=is_read) for name, setting in result.items()}
