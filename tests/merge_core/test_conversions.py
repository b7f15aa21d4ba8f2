"""Compare conversions.json, and names in memory, with the conversions of the installed transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_families import FAMILIES
from transformers import CONFIG_MAPPING, PreTrainedModel, conversion_mapping, core_model_loading
from transformers.models.auto import modeling_auto

from mergegate.merge_core import architecture
from mergegate.merge_core.adapters.application import _TRANSPOSED_EXPERTS
from mergegate.merge_core.architecture import Conversions, is_head

CONVERSIONS = Path(architecture.__file__).parent / "conversions.json"
MAPPINGS = (
    *("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM"),
    "PRETRAINING",
)
# Settings without which the default configuration of a model type describes no network.
NEEDED: dict[str, Any] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
}
DEPTHS = ("num_hidden_layers", "num_layers", "depth", "n_layer", "encoder_layers", "decoder_layers")
Settings = dict[str, Any]
# Text families and containers of several kinds, with renamed, fused, grouped and nested tensors.
SAMPLE = (
    *("mixtral", "llama4", "gpt_oss", "phimoe", "jamba", "gpt_neox", "bert", "t5", "whisper", "deepseek_v3"),
    *("gemma3", "llava", "qwen2_5_vl", "kimi_k25", "internvl", "mistral_large4", "lfm3_vl", "hy_v3", "step3p7"),
)


def settings_of(transform: Any) -> Settings:
    """Return a transform of transformers as an entry of conversions.json."""
    entry: Settings = {"match": transform.compiled_sources.pattern, "to": list(transform.target_patterns)}
    if isinstance(transform, core_model_loading.GroupWeightRename):
        entry["group"] = True
    if isinstance(transform, core_model_loading.Inkling2IndexOffsetWeightRename):
        entry["offset"] = transform.offset
    if isinstance(transform, core_model_loading.WeightConverter):
        entry["operations"] = [
            [type(operation).__name__, {key: value for key, value in sorted(vars(operation).items()) if value}]
            for operation in transform.operations
        ]
    return entry


def base_classes() -> dict[str, str]:
    """Return the class of the network without a head, by model type."""
    return {
        kind: name if isinstance(name, str) else name[0] for kind, name in modeling_auto.MODEL_MAPPING_NAMES.items()
    }


@cache
def library_transforms() -> dict[str, list[Settings] | str]:
    """Return the entries of transformers' table, or the name of an equal entry."""
    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    entries = {key: [settings_of(transform) for transform in mapping[key]] for key in sorted(mapping)}
    first: dict[str, str] = {}
    result: dict[str, list[Settings] | str] = {}
    for key, entry in sorted(entries.items()):
        owner = first.setdefault(json.dumps(entry), key)
        result[key] = entry if owner == key else owner
    return result


def library_structures(kinds: tuple[str, ...] = ()) -> dict[str, Settings]:
    """Return the structure of each network with conversions or with a text part, by model type."""
    entries: dict[str, Settings] = {}
    for model in library_models(kinds):
        entry = {**structure(model), "unchanged": unchanged(model)}
        kind = model.config.model_type
        if entry["parts"] or entry.get("text") or {kind, type(model).__name__} & library_transforms().keys():
            entries.setdefault(kind, entry)
    return dict(sorted(entries.items()))


@cache
def library_models(kinds: tuple[str, ...] = ()) -> list[Any]:
    """Return a network without weights and with few layers for each generating class of transformers."""
    classes: dict[str, str] = {}
    for mapping in MAPPINGS:
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            classes |= {name: kind for name in ([names] if isinstance(names, str) else names) if name not in classes}
    tiny = {family.model_type: family for family in FAMILIES}
    models = []
    for name, kind in classes.items():
        for config in candidates(kind, tiny) if kind in kinds or not kinds else ():
            try:
                with torch.device("meta"):
                    models.append(getattr(transformers, name)(config))
            except Exception:  # Some default configurations, or those of a part, do not describe a network.
                continue
            break
    return models


def candidates(kind: str, tiny: dict[str, Any]) -> Iterator[Any]:
    """Yield configurations for a model type: that of the tests, the default one, and that of its text part."""
    for parts in (tiny, {}):
        for text in (False, True):
            try:
                config = parts[kind].config() if parts else CONFIG_MAPPING[kind](**NEEDED.get(kind, {}))
                config = config.get_text_config() if text else config
                if not parts:
                    shrink(config)
            except Exception:  # The configuration has no defaults, or the tests do not know it.
                continue
            yield config


def shrink(config: Any) -> None:
    """Reduce the number of layers, which does not affect the structure."""
    for key in DEPTHS:
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, min(2, getattr(config, key)))
    for key in type(config).sub_configs or {}:
        if getattr(config, key, None) is not None:
            shrink(getattr(config, key))


def structure(model: Any) -> Settings:
    """Return where the parts of a network are, with the key of each part's configuration or of its conversions."""
    prefix, mapping = model.base_model_prefix, conversion_mapping.get_checkpoint_conversion_mapping
    base = getattr(model, prefix, model) if prefix else model
    inner = {name.partition(".")[0] for name in [*base._modules, *base._parameters, *base._buffers]}
    entry: Settings = {"base": type(base).__name__, "prefix": prefix, "inner": sorted(inner), "parts": []}
    if base is model:
        entry["inner"] = []
    owners = {id(getattr(model.config, key, None)): key for key in type(model.config).sub_configs or {}}
    seen: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        name, kind, part = type(module).__name__, module.config.model_type, owners.get(id(module.config))
        relative = path.removeprefix(prefix).removeprefix(".")
        if part == "text_config" and base_classes().get(kind) == name:
            entry["text"] = [part, kind]
        if claimed(seen, name, path):
            continue
        by_class = mapping(name) is not None
        if by_class or not claimed(seen, kind, path):
            key = name if by_class else kind
            is_part = part is not None and base_classes().get(kind) == name
            if path and (is_part or mapping(key) is not None):
                entry["parts"].append([relative, None if is_part else key, part if is_part else None])
            if mapping(key) is not None:
                seen.setdefault(name, []).append(path)
                if not by_class:
                    seen.setdefault(kind, []).append(path)
    return entry


def unchanged(model: Any) -> list[str]:
    """Return the names in memory that the renamings would change, and that transformers reads as they are."""
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, core_model_loading.WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, core_model_loading.WeightConverter)]
    names = model.state_dict()
    renamed = {
        name: core_model_loading.rename_source_key(name, renamings, converters, model.base_model_prefix, names)[0]
        for name in names
    }
    return sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name) for name in names if renamed[name] not in names})


def library_loading(kinds: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Return what the classes of transformers ignore and tie, by class, and keep in float32, by model type."""
    tables: dict[str, dict[str, Any]] = {"ignored": {}, "tied": {}, "float32": {}}
    for mapping in (name for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES")):
        for kind, names in getattr(modeling_auto, mapping).items():
            for name in ([names] if isinstance(names, str) else names) if kind in kinds or not kinds else ():
                model = getattr(transformers, name, None)
                if ignored := getattr(model, "_keys_to_ignore_on_load_unexpected", None):
                    tables["ignored"][name] = sorted(ignored)
                tied = getattr(model, "_tied_weights_keys", None)
                pairs = {to: of.strip("^$") for to, of in (tied if isinstance(tied, dict) else {}).items()}
                # A model may have a head of its own. Every model of the class shares the other tensors.
                copies = {to for to, of in pairs.items() if re.fullmatch(r"[\w.]+", to + of) and not is_head(to)}
                if copies:
                    tables["tied"][name] = {to: pairs[to] for to in sorted(copies)}
                for number, key in enumerate(("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")):
                    if kept := getattr(model, key, None):
                        lists = tables["float32"].setdefault(kind, [[], []])
                        lists[number] = sorted({*lists[number], *kept})
    return {name: dict(sorted(table.items())) for name, table in tables.items()}


def claimed(seen: dict[str, list[str]], identifier: str, path: str) -> bool:
    return any(owner == "" or path.startswith(owner + ".") for owner in seen.get(identifier, ()))


def test_conversions_are_those_of_transformers() -> None:
    if os.environ.get("UPDATE_CONVERSIONS"):
        bases = {kind: name for kind, name in base_classes().items() if name in library_transforms()}
        tables = {"transforms": library_transforms(), "classes": bases, "structures": library_structures()}
        tables |= {"loading": library_loading()}
        written = [
            f"{json.dumps(name)}: {{\n"
            + ",\n".join(f"{json.dumps(key)}: {json.dumps(table[key])}" for key in table)
            + "}"
            for name, table in tables.items()
        ]
        CONVERSIONS.write_text("{" + ",\n".join(written) + "}\n")
    recorded = json.loads(CONVERSIONS.read_text())
    assert recorded["transforms"] == library_transforms(), "run with UPDATE_CONVERSIONS=1 to generate the file"


@pytest.mark.story
@pytest.mark.parametrize("kinds", [SAMPLE, pytest.param((), marks=pytest.mark.proof)], ids=["sample", "all"])
def test_structures_are_those_of_transformers(kinds: tuple[str, ...]) -> None:
    recorded = json.loads(CONVERSIONS.read_text())["structures"]
    found = library_structures(kinds)
    assert len(found) > len(kinds) / 2
    assert found == ({kind: recorded[kind] for kind in found} if kinds else recorded)


@pytest.mark.story
@pytest.mark.parametrize("kinds", [SAMPLE, pytest.param((), marks=pytest.mark.proof)], ids=["sample", "all"])
def test_loading_is_that_of_transformers(kinds: tuple[str, ...]) -> None:
    recorded = json.loads(CONVERSIONS.read_text())["loading"]
    for table, found in library_loading(kinds).items():
        assert found == ({name: recorded[table].get(name) for name in found} if kinds else recorded[table])


def test_experts_have_their_own_number_in_memory() -> None:
    fused = Conversions({"model_type": "mixtral"}, "MixtralForCausalLM", ())
    for number in (0, 7, 12):
        place = fused.in_memory(f"model.layers.1.block_sparse_moe.experts.{number}.w3.weight")
        assert (place.names, place.source, place.number) == (("model.layers.1.mlp.experts.gate_up_proj",), 1, number)
    separate = Conversions({"model_type": "unheard-of"}, "", ())
    assert separate.in_memory("model.layers.1.mlp.experts.7.w3.weight").names == (
        "model.layers.1.mlp.experts.7.w3.weight",
    )


@pytest.mark.parametrize("value", [None, True, 5, 1.5, "unheard-of", [], ["x"], {}, {"a": 1}])
def test_a_part_with_a_model_type_of_any_json_type_has_no_conversions(value: Any) -> None:
    structures = json.loads(CONVERSIONS.read_text())["structures"]
    for kind, part in {(kind, part) for kind, entry in structures.items() for _, _, part in entry["parts"] if part}:
        expected = Conversions({"model_type": kind, part: {}}, "", ()).transforms
        for inner in (value, {"model_type": value}):
            assert Conversions({"model_type": kind, part: inner}, "", ()).transforms == expected


@pytest.mark.story
@pytest.mark.parametrize("kinds", [SAMPLE, pytest.param((), marks=pytest.mark.proof)], ids=["sample", "all"])
def test_transforms_of_a_network_are_those_that_transformers_applies_in_its_order(kinds: tuple[str, ...]) -> None:
    for model in library_models(kinds):
        expected = [
            (transform.compiled_sources.pattern, transform.scope_prefix)
            for transform in conversion_mapping.get_model_conversion_mapping(model)
        ]
        config = json.loads(model.config.to_json_string(use_diff=False))
        pairs = [
            (transform.match.pattern, None if transform.scope is None else transform.scope[1].removesuffix("."))
            for transform in Conversions(config, type(model).__name__, ()).transforms
        ]
        assert pairs == expected, type(model).__name__
    assert len(library_models(kinds)) > (len(kinds) if kinds else 280)


def test_fused_experts_are_transposed_in_the_families_that_mergegate_lists() -> None:
    """PEFT decides the orientation of square experts by the attribute ``is_transposed`` of their class."""
    root = Path(transformers.__file__).parent / "models"
    marked = [path for path in root.glob("*/modeling_*.py") if "is_transposed=True" in path.read_text("utf-8")]
    listed = {kind.removesuffix("_text") for kind in _TRANSPOSED_EXPERTS}
    assert {path.parent.name for path in marked} == listed
