"""Configurations with the same meaning compare equal. The oracles are networks and config classes of transformers."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import itertools
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import every_family
import pytest
import torch
import transformers
from family import random_tensors, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sampled
from tiny_families import FAMILIES, LAYERS, TOKENS, TinyFamily
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto import modeling_auto

from mergegate.merge_core import Finding, architecture, load_recipe, open_checkpoint, plan_with_findings
from mergegate.merge_core.architecture import described_families, differing_settings, layer_kinds, text_part
from mergegate.merge_core.architecture.meaning import _LENGTHS, _ROPE_KEYS, has_effect

DEFAULTS = Path(architecture.__file__).parent / "defaults.json"
OPTIONAL_READ = re.compile(r'getattr\((?:self\.)?config, "(\w+)"(?:, ([^()]+))?\)')
CLASSIFIERS = (
    *("albert", "arcee", "axk1", "bert", "big_bird", "biogpt", "bloom", "camembert", "canine"),
    *("convbert", "ctrl", "data2vec-text", "deberta", "deberta-v2", "diffllama", "distilbert", "doge", "electra"),
    *("ernie", "eurobert", "exaone4", "falcon", "flaubert", "fnet", "gemma", "gemma2", "gemma3"),
    *("gemma3_text", "modernbert", "xlnet"),
)
RUNTIME = re.compile("token_id|label|depth|n_layer|^output_|^use_cache")
CHOICES = ("cls", "mean", "first", "last", "relu")
# Other inputs of classifiers.
OTHER = ("IMAGE", "AUDIO", "VIDEO")
# Keys that have separate checks, and keys that select the network class.
NOT_VARIED = {"model_type", "vocab_size", "num_hidden_layers", "tie_word_embeddings"}
QUICK = ("llama", "gemma2", "granite", "qwen3_moe")
FREQUENT = (*QUICK, "mistral", "gemma3_text", "gpt2", "deepseek_v3", "llama4_text", "bert", "mamba2")
COMPARED = (
    *("llama", "mistral", "qwen2", "qwen2, window", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3", "granite"),
    *("phi3", "glm", "cohere", "cohere2", "olmo2", "stablelm", "gpt_neox", "smollm3", "phimoe", "deepseek_v3", "gpt2"),
)


def full(config: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return content


def literal(text: str | None) -> Any:
    try:
        return ast.literal_eval(text or "None")
    except (ValueError, SyntaxError):
        return None


def library_types() -> list[str]:
    tasks = ("CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", *(f"{x}_CLASSIFICATION" for x in OTHER))
    types = {
        *(kind for task in tasks for kind in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")),
        *(kind for family in described_families() for kind in family.model_types),
    }
    parts = [(CONFIG_MAPPING[kind].sub_configs or {}).get("text_config") for kind in types if kind in CONFIG_MAPPING]
    types |= {part.model_type for part in parts if getattr(part, "model_type", None)}
    return sorted(kind for kind in types if kind in CONFIG_MAPPING)


def library_defaults(kind: str) -> dict[str, Any] | None:
    """Return the defaults of transformers' configuration class, or None if the class has none."""
    made = CONFIG_MAPPING[kind]
    try:
        config = made()
    except Exception:  # A part that requires another configuration.
        return None
    names = {old: new for old, new in made.attribute_map.items() if has_effect(old)}
    written, values = full(config), {}
    for setting in dataclasses.fields(made):
        key = names.get(setting.name, setting.name)
        if key in _ROPE_KEYS or key.endswith("_config") or not (has_effect(key) or key in _LENGTHS):
            continue
        default = setting.default
        if default is dataclasses.MISSING:
            default = setting.default_factory() if setting.default_factory is not dataclasses.MISSING else None
        if isinstance(default, (type(None), bool, int, float, str, list, tuple, dict)):
            values[key] = list(default) if isinstance(default, tuple) else default
    modeling = Path(inspect.getfile(made)).with_name(
        Path(inspect.getfile(made)).name.replace("configuration", "modeling")
    )
    for key, default in OPTIONAL_READ.findall(modeling.read_text() if modeling.is_file() else ""):
        if has_effect(key) and key not in _ROPE_KEYS:
            values.setdefault(names.get(key, key), literal(default))
    sizes = ("head_dim", "num_key_value_heads")
    derived = sorted(key for key in values if values[key] is None and written.get(key) and key not in sizes)
    entry = {"values": values, "names": names, "derived": derived, "rope": getattr(config, "rope_parameters", None)}
    return {key: value for key, value in entry.items() if value}


@pytest.mark.story
def test_defaults_are_those_of_transformers() -> None:
    """Set ``UPDATE_GOLDEN=1`` to rewrite the file for another version of transformers."""
    entries = {kind: entry for kind in library_types() if (entry := library_defaults(kind)) is not None}
    lines = [f"{json.dumps(kind)}: {json.dumps(entry, sort_keys=True)}" for kind, entry in entries.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if os.environ.get("UPDATE_GOLDEN"):
        DEFAULTS.write_text(text)
    assert DEFAULTS.read_text() == text


def reported(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        theirs.key
        for mine, theirs in differing_settings(first, other)
        if mine.is_read and "derived" not in (mine.source, theirs.source)
    ]


def kinds_per_layer(config: dict[str, Any]) -> list[Any]:
    return [layer_kinds(text_part(config), index, LAYERS, "config.json") for index in range(LAYERS)]


def other_values(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (max(1, value // 2), value * 2)
    elif isinstance(value, float):
        yield value / 2 + 0.01
    elif value is None:
        yield from (0.5, 2)
    elif value in ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh"):
        yield "relu"


class Network:
    """A tiny network of a family, whose random weights also work with other configurations of the family."""

    def __init__(self, family: TinyFamily) -> None:
        self.family, self.config = family, full(family.config())
        network = self._build(self.config)
        generator = torch.Generator().manual_seed(1)
        self.weights = {
            name: torch.randn(tensor.shape, generator=generator) * 0.3 if tensor.is_floating_point() else tensor
            for name, tensor in network.state_dict().items()
        }
        self.answer = self.logits(self.config)

    def _build(self, config: dict[str, Any]) -> Any:
        read = AutoConfig.for_model(**copy.deepcopy(config))
        return self.family.loader.from_config(read).float().eval()

    @torch.no_grad()
    def logits(self, config: dict[str, Any]) -> torch.Tensor | None:
        """Return the logits under ``config``, or None if the weights do not fit it or it is invalid."""
        tokens = torch.tensor([[(7 * number + 3) % (TOKENS - 10) + 3 for number in range(24)]])
        try:
            network = self._build(config)
            network.load_state_dict(self.weights)
            return torch.as_tensor(network(tokens).logits)
        except Exception:  # The library refuses such a configuration in many ways.
            return None


@cache
def network(name: str) -> Network:
    return Network(next(family for family in FAMILIES if family.name == name))


@pytest.mark.story
@pytest.mark.parametrize("name", sampled(COMPARED, QUICK, pytest.mark.proof))
def test_every_key_that_changes_the_logits_is_reported(name: str) -> None:
    """The test changes one key at a time and keeps the weights. It lists neither the keys nor their values."""
    made, silent, changed = network(name), [], 0
    for key, value in made.config.items():
        for other in other_values(value) if key not in NOT_VARIED else ():
            config = {**made.config, key: other}
            answer = made.logits(config)
            if answer is None or made.answer is None or torch.allclose(answer, made.answer, rtol=1e-4, atol=1e-5):
                continue
            changed += 1
            both = reported(made.config, config) and reported(config, made.config)
            if not both and kinds_per_layer(config) == kinds_per_layer(made.config):
                silent.append((key, other))
            break
    assert silent == []
    assert changed >= 2


def built(config: dict[str, Any], class_name: str, weights: dict[str, Any]) -> torch.Tensor | None:
    """Return the outputs of a classifier, or None if the weights do not fit the configuration or it is invalid."""
    try:
        made = getattr(transformers, class_name)(AutoConfig.for_model(**copy.deepcopy(config))).float().eval()
        made.load_state_dict(weights)
        with torch.no_grad():
            return torch.as_tensor(made(torch.tensor([[5, 9, 11, 7, 8, 6, 12, 10]])).logits)
    except Exception:  # The library refuses such a configuration in many ways.
        return None


@pytest.mark.story
@pytest.mark.parametrize("kind", sampled(CLASSIFIERS, ("bert", "xlnet", "modernbert"), pytest.mark.proof))
def test_every_key_that_changes_the_outputs_of_a_classifier_is_reported(kind: str) -> None:
    class_name = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[kind]
    made = every_family.build(kind, class_name)
    config, generator = full(made.config), torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(tensor.shape, generator=generator) * 0.3 if tensor.is_floating_point() else tensor
        for name, tensor in made.state_dict().items()
    }
    answer, silent = built(config, class_name, weights), []
    assert answer is not None
    for key, value in config.items():
        for other in (*other_values(value), *(choice for choice in CHOICES if isinstance(value, str))):
            if key in NOT_VARIED or RUNTIME.search(key) or other == value:
                continue
            changed = {**config, key: other}
            outputs = built(changed, class_name, weights)
            if outputs is None or outputs.shape != answer.shape or torch.allclose(outputs, answer, 1e-4, 1e-5):
                continue
            if not reported(config, changed) or not reported(changed, config):
                silent.append((key, other))
            break
    assert silent == []


@pytest.mark.parametrize(
    ("name", "first", "other"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4}, {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4}, {"use_sliding_window": False}),
        ("llama", {"head_dim": None}, {"head_dim": 8}),
        ("llama", {"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ("llama", {"hidden_act": "silu"}, {"hidden_act": "swish"}),
        ("gemma2", {"final_logit_softcapping": None}, {"final_logit_softcapping": 0.5}),
        ("mistral", {"sliding_window": None}, {"sliding_window": 4}),
        ("mistral", {"sliding_window": 4, "use_sliding_window": False}, {"sliding_window": None}),
        ("gpt2", {"activation_function": "gelu_new"}, {"activation_function": "gelu_pytorch_tanh"}),
    ],
)
def test_spellings_are_reported_exactly_if_the_logits_differ(
    name: str, first: dict[str, Any], other: dict[str, Any]
) -> None:
    made = network(name)
    one, two = ({**made.config, "layer_types": None, **changes} for changes in (first, other))
    one, two = ({key: value for key, value in config.items() if value != "-"} for config in (one, two))
    answers = made.logits(one), made.logits(two)
    if answers[0] is None or answers[1] is None:  # The two configurations need weights of different sizes.
        assert reported(one, two) == []
        return
    same = torch.allclose(answers[0], answers[1], rtol=1e-4, atol=1e-5)
    assert (reported(one, two) == [] and kinds_per_layer(one) == kinds_per_layer(two)) == same


THETAS = st.sampled_from([10_000.0, 500_000.0, 1_000_000])
SCALINGS = st.sampled_from([
    {}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
])  # fmt: skip


@st.composite
def rope(draw: st.DrawFn) -> dict[str, Any]:
    """Draw position settings in one of their equivalent spellings."""
    theta, scaling = draw(st.none() | THETAS), dict(draw(SCALINGS))
    spelling = draw(st.sampled_from(["older", "type", "newer"]))
    length = draw(st.sampled_from([64, 128])) if scaling.get("rope_type") == "llama3" else 64
    if spelling == "newer":
        parameters = {"rope_type": "default", **scaling, **({} if theta is None else {"rope_theta": theta})}
        return {"max_position_embeddings": length, "rope_parameters": parameters}
    if spelling == "type" and scaling:
        scaling["type"] = scaling.pop("rope_type")
    stated = {} if theta is None else {"rope_theta": theta}
    return {"max_position_embeddings": length, **stated, "rope_scaling": scaling or None}


@pytest.mark.story
@given(st.sampled_from(["llama", "mistral", "qwen2", "cohere", "olmo2", "granite", "glm", "stablelm"]), rope(), rope())
@settings(max_examples=150)
def test_two_spellings_of_positions_are_equal_exactly_if_transformers_reads_them_equally(
    kind: str, first: dict[str, Any], other: dict[str, Any]
) -> None:
    read = [full(AutoConfig.for_model(kind, **copy.deepcopy(one)))["rope_parameters"] for one in (first, other)]
    for parameters in read:
        parameters.pop("type", None)
    differing = reported({"model_type": kind, **first}, {"model_type": kind, **other})
    assert (differing == []) == (read[0] == read[1]), (differing, read)


@pytest.mark.parametrize(
    ("kind", "older", "newer"),
    [
        ("gpt_neox", {"rotary_emb_base": 5000, "rotary_pct": 0.5}, {"rope_theta": 5000, "partial_rotary_factor": 0.5}),
        ("stablelm", {"partial_rotary_factor": 0.5}, {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        ("phi", {}, {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    ],
)
def test_older_names_of_partial_rotation_are_read(kind: str, older: dict[str, Any], newer: dict[str, Any]) -> None:
    newer = {"model_type": kind, "rope_parameters": {"rope_type": "default", **newer}}
    assert reported({"model_type": kind, **older}, newer) == []
    changed = {**newer["rope_parameters"], "partial_rotary_factor": 0.75}
    assert reported({"model_type": kind, **older}, {"model_type": kind, "rope_parameters": changed}) != []


def test_positions_of_each_type_of_layer_are_compared() -> None:
    older = {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "rope_scaling": None}
    default = {"rope_type": "default"}
    newer = {"full_attention": {**default, "rope_theta": 1e6}, "sliding_attention": {**default, "rope_theta": 1e4}}
    assert reported(older, {"model_type": "gemma3_text", "rope_parameters": newer}) == []
    newer["sliding_attention"] = {**default, "rope_theta": 5e3}
    (key,) = reported(older, {"model_type": "gemma3_text", "rope_parameters": newer})
    assert key == "rope_parameters.sliding_attention.rope_theta"


@pytest.mark.parametrize("kind", sampled(json.loads(DEFAULTS.read_text()), FREQUENT))
def test_missing_keys_have_the_defaults_of_the_family(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    assert reported(full(config), json.loads(config.to_json_string(use_diff=True))) == []
    assert reported(full(config), full(config)) == []


UNREAD = st.sampled_from(["transformers_version", "_name_or_path", "torch_dtype", "use_cache", "unsloth_version"])


@pytest.mark.parametrize("kind", ["llama", "unheard-of"])
@settings(max_examples=20)
@given(st.dictionaries(UNREAD, st.none() | st.booleans() | st.text(max_size=3)))
def test_names_versions_and_formats_are_not_compared(kind: str, keys: dict[str, Any]) -> None:
    assert reported({"model_type": kind}, {"model_type": kind, **keys}) == []


def test_an_unknown_family_is_compared_key_by_key() -> None:
    first = {"model_type": "unheard-of", "warp_multiplier": 1.0, "nested": {"scale": 2, "dropout": 0.1}}
    assert reported(first, {**first, "warp_multiplier": 2.0}) == ["warp_multiplier"]
    assert reported(first, {**first, "nested": {"scale": 3, "dropout": 0.2}}) == ["nested.scale"]
    assert reported(first, {**first, "mlp_bias": False, "rope_scaling": None}) == []
    del first["warp_multiplier"]
    assert reported(first, {**first, "warp_multiplier": 2.0}) == ["warp_multiplier"]


def test_the_text_part_is_compared_regardless_of_its_position() -> None:
    text = {"model_type": "qwen2_5_vl_text", "rms_norm_eps": 1e-6}
    nested = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": {"depth": 2}}
    flat = {"model_type": "qwen2_5_vl", "rms_norm_eps": 1e-6, "vision_config": {"depth": 2}}
    assert reported(nested, flat) == []
    assert reported(nested, {**flat, "rms_norm_eps": 1e-5}) == ["rms_norm_eps"]
    assert reported(nested, {**nested, "vision_config": {"depth": 3}}) == ["vision_config.depth"]
    changed = {**nested, "text_config": {**text, "rms_norm_eps": 1e-5}}
    assert reported(nested, changed) == ["text_config.rms_norm_eps"]


ANY_JSON: tuple[Any, ...] = (
    *(None, False, True, 0, 5, -1.5, 10**400, "", "linear", [], [1], ["x"], [[]], {}, {"a": 1}),
    *({"type": value} for value in ([], {}, 5, True)),
    *({"full_attention": {"rope_type": value}} for value in ([], {}, 5)),
    *({"full_attention": value} for value in ([], "x", 5)),
)


@pytest.mark.parametrize("kind", [[], "llama", "gemma3_text"])
@pytest.mark.parametrize("key", ["rope_parameters", "layer_types", "model_type"])
def test_any_value_in_a_part_other_than_the_text_is_compared(key: str, kind: Any) -> None:
    for value, place in itertools.product(ANY_JSON, ("vision_config", "x")):
        inner = {"model_type": kind, "sliding_window": 4, "max_position_embeddings": 8, key: value}
        for config in ({place: inner}, {place: {"deeper": inner}}, {"text_config": {}, place: inner}):
            assert reported(config, copy.deepcopy(config)) == []
            other = copy.deepcopy(config)
            other[place].get("deeper", other[place])[key] = "other"
            if key in _ROPE_KEYS:
                assert reported(config, other)


def found(root: Path, first: dict[str, Any], other: dict[str, Any], *accepted: str) -> list[Finding]:
    root = Path(mkdtemp(dir=root))
    save_checkpoint(root / "a", random_tensors(0), config=first)
    save_checkpoint(root / "b", random_tensors(1), config=other)
    recipe = load_recipe("merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n")
    checkpoints = {name: open_checkpoint(root / name) for name in "ab"}
    return list(plan_with_findings(recipe, checkpoints, accepted).findings)


def labels(*names: str) -> dict[str, Any]:
    return {"id2label": {str(number): name for number, name in enumerate(names)}}


HEADS = [
    (labels("O", "PER", "ORG"), labels("O", "ORG", "PER"), "block"),
    (labels("neg", "pos"), labels("ham", "spam"), "block"),
    (labels("+", "-"), labels("-", "+"), "block"),
    (labels("ENTAILMENT", "not-entailed"), labels("entailment", "not_entailed"), None),
    (labels("O", "PER"), labels("LABEL_0", "LABEL_1"), None),
    (labels("O", "PER"), labels("0", "1"), None),
    (labels("O", "PER"), {}, None),
    ({"problem_type": "single_label_classification"}, {"problem_type": "multi_label_classification"}, "block"),
    ({"problem_type": "single_label_classification"}, {"problem_type": None}, None),
    ({"problem_type": "single_label_classification"}, {}, None),
    ({"problem_type": "regression"}, {}, "warn"),
    ({"summary_type": "last"}, {"summary_type": "mean"}, "block"),
    ({"classifier_pooling": "mean"}, {"classifier_pooling": "cls"}, "block"),
    ({"pooling_mode": "mean"}, {"pooling_mode": "cls"}, "block"),
    ({"output_stride": 8}, {"output_stride": 16}, "warn"),
    ({"unheard_of": 8}, {"unheard_of": 16}, "warn"),
    ({"hidden_dropout": 0.1, "classifier_dropout": 0.1}, {"hidden_dropout": 0.2, "classifier_dropout": None}, None),
    ({"summary_last_dropout": 0.1, "mask_time_prob": 0.1}, {"summary_last_dropout": 0.2, "mask_time_prob": 0.0}, None),
    ({"label2id": {"a": 0}, "finetuning_task": "x"}, {"label2id": {"b": 0}}, None),
]


@pytest.mark.parametrize(("first", "other", "severity"), HEADS)
def test_outputs_of_different_meaning_are_not_averaged(
    tmp_path: Path, first: dict[str, Any], other: dict[str, Any], severity: str | None
) -> None:
    head = {"model_type": "unheard-of", "architectures": ["BertForSequenceClassification"]}
    both = {**head, **first}, {**head, **other}
    for one, two in (both, both[::-1]):
        assert [finding.severity for finding in found(tmp_path, one, two)] == ([severity] if severity else [])
    if severity == "block":
        (key,) = first
        assert [finding.severity for finding in found(tmp_path, *both, key)] == ["info"]
    if severity == "block" and "pooling" not in str(first):  # No head of a language model reads these settings.
        generator = {"model_type": "unheard-of", "architectures": ["LlamaForCausalLM"]}
        assert found(tmp_path, {**generator, **first}, {**generator, **other}) == []


@pytest.mark.parametrize("kind", sampled(json.loads(DEFAULTS.read_text()), FREQUENT, pytest.mark.proof))
def test_a_family_reports_each_of_its_keys_except_those_of_training(kind: str) -> None:
    config = json.loads(DEFAULTS.read_text())[kind]
    described = text_part({"model_type": kind}).family  # Slices compare these keys layer by layer.
    for key, value in config["values"].items():
        is_single = has_effect(key) and "window" not in key and not (described and key in described.keys)
        if isinstance(value, int | float | str) and is_single:
            other = f"other {value}" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1
            assert reported({"model_type": kind, key: value}, {"model_type": kind, key: other}), key
    for key in (
        "hidden_dropout_prob",
        "attention_dropout",
        "initializer_range",
        "router_aux_loss_coef",
        "drop_path_rate",
    ):
        assert reported({"model_type": kind, key: 0.1}, {"model_type": kind, key: 0.2}) == []


def test_a_finding_names_both_spellings(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, {"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}})
    assert (finding.severity, finding.where) == ("block", "b: config.json: rope_parameters.rope_theta")
    assert finding.found == "10000.0: a factor of 100, so positions are rotated differently"
    assert finding.expected.startswith("1000000.0 (rope_theta), ")
    (finding,) = found(tmp_path, {"rope_theta": 1e6}, {"rope_theta": 1e4}, "rope_theta")
    assert finding.severity == "info"


def test_null_is_a_value_and_a_missing_key_has_the_default(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (finding,) = found(tmp_path, mistral, {**mistral, "sliding_window": None})
    assert (finding.severity, finding.where, finding.found) == ("warn", "b: config.json: sliding_window", "null")
    assert finding.expected.startswith("4096 (the default), as in a")


def test_an_ignored_key_is_reported_as_information(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, {"attn_logit_softcapping": 30.0}, {"attn_logit_softcapping": 50.0})
    assert (finding.severity, finding.where) == ("info", "b: config.json: attn_logit_softcapping")
