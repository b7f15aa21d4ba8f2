"""Every incompatibility in headers, configs and tokenizers is reported in one pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from family import (
    LINEAR,
    change_json,
    check_recipe,
    load,
    merge_text,
    open_models,
    random_tensors,
    save_checkpoint,
    save_tokenizer,
)

from mergegate.merge_core import Finding, load_recipe, open_checkpoint, plan_merge, plan_with_findings, preflight
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.plan import compatibility


def findings(root: Path, text: str = LINEAR) -> tuple[Finding, ...]:
    return check_recipe(text, root).findings


def blocking(found: tuple[Finding, ...]) -> list[str]:
    return [finding.where for finding in found if finding.severity == "block"]


def pair(root: Path, *, tensors: Any = None, config: Any = None, **sizes: int) -> None:
    save_checkpoint(root / "a", random_tensors(0))
    save_checkpoint(root / "b", tensors or random_tensors(1, **sizes), config=config)


def test_one_call_returns_findings_and_plan_and_assembles_once(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assemble, recipe = Mock(wraps=compatibility.assemble), load_recipe(LINEAR)
    monkeypatch.setattr(compatibility, "assemble", assemble)
    opened = open_models(recipe, family)
    result = plan_with_findings(recipe, opened)
    assert assemble.call_count == 1
    assert result.plan == plan_merge(recipe, opened)
    assert result.findings == preflight(recipe, opened) == ()


def test_a_different_vocabulary_size_is_reported_for_tensors_and_config_and_leaves_no_plan(tmp_path: Path) -> None:
    pair(tmp_path, tokens=30)
    result = check_recipe(LINEAR, tmp_path)
    assert result.plan is None
    assert {"b: model.embed_tokens.weight", "b: config.json: vocab_size"} <= set(blocking(result.blocking))
    recipe = load_recipe(LINEAR)
    with pytest.raises(InvalidInput, match=r"shape \[30, 12\]"):
        plan_merge(recipe, open_models(recipe, tmp_path))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [([f"t{n}" for n in reversed(range(24))], "24 tokens"), (["other", *(f"t{n}" for n in range(1, 24))], "")],
    ids=["other ids", "another token"],
)
def test_tokens_with_different_ids_block_the_merge_although_it_has_a_plan(
    family: Path, tokens: list[str], words: str
) -> None:
    save_tokenizer(family / "b", tokens)
    result = check_recipe(LINEAR, family)
    assert result.plan is not None
    (finding,) = result.findings
    assert (finding.severity, finding.where) == ("block", "b: tokenizer.json")
    assert words in finding.found


def test_a_reference_without_checkpoint_is_a_finding() -> None:
    result = plan_with_findings(load_recipe(LINEAR), {})
    assert result.plan is None
    assert blocking(result.findings) == ["a"]


def test_tokens_that_only_one_model_has_block_unless_recipe_or_profile_handles_them(family: Path) -> None:
    save_tokenizer(family / "b", [f"t{number}" for number in range(26)])
    (finding,) = findings(family)
    assert (finding.severity, finding.where) == ("block", "b: tokenizer.json")
    assert "accepted: [vocabulary]" in finding.remedy
    assert "tokenizer_source" in finding.remedy
    assert [one.severity for one in check_recipe(LINEAR, family, "vocabulary").findings] == ["info"]


@pytest.mark.parametrize(
    ("config", "where", "severity"),
    [
        ({"architectures": ["QwenForCausalLM"]}, "b: config.json: architectures", "block"),
        ({"quantization_config": {"quant_method": "gptq"}}, "b: config.json: quantization_config", "block"),
        ({"num_hidden_layers": 7}, "b: config.json: num_hidden_layers", "block"),
        ({"rope_theta": 1e6}, "b: config.json: rope_theta", "block"),
        ({"rope_theta": 1e2}, "b: config.json: rope_theta", "block"),
        ({"rope_theta": 9e5}, "b: config.json: rope_theta", "warn"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 200.0}},
            "b: config.json: rope_scaling",
            "warn",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "b: config.json: rope_scaling",
            "warn",
        ),
    ],
)
def test_contradictory_configs_are_reported(tmp_path: Path, config: dict[str, Any], where: str, severity: str) -> None:
    save_checkpoint(tmp_path / "a", random_tensors(0), config={"rope_theta": 1e4})
    save_checkpoint(tmp_path / "b", random_tensors(1), config=config)
    assert (severity, where) in [(finding.severity, finding.where) for finding in findings(tmp_path)]


@pytest.mark.parametrize(
    ("changes", "config", "where"),
    [
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(12)}, {}, "model.layers.0.self_attn.q_proj.bias"),
        ({"lm_head.weight": torch.ones(24, 12).to(torch.float8_e4m3fn)}, {}, "lm_head.weight"),
        (
            {},
            {"text_config": {"quantization_config": {"quant_method": "awq"}}},
            "config.json: text_config.quantization_config",
        ),
    ],
    ids=["unused tensor", "quantized payload", "quantized text part"],
)
def test_unused_tensors_and_quantized_parts_are_reported(
    tmp_path: Path, changes: dict[str, torch.Tensor], config: dict[str, Any], where: str
) -> None:
    pair(tmp_path, tensors={**random_tensors(1), **changes}, config=config)
    assert blocking(findings(tmp_path)) == [f"b: {where}"]


@pytest.mark.parametrize(
    "method", ["bitsandbytes", "gptq", "awq", "fp8", "mxfp4", "torchao", "compressed-tensors", None]
)
@pytest.mark.parametrize("part", ["", "text_config"])
def test_a_quantization_config_over_full_weights_names_the_key_to_delete(
    tmp_path: Path, method: str | None, part: str
) -> None:
    leftover = {"quantization_config": {"load_in_4bit": True} | ({"quant_method": method} if method else {})}
    pair(tmp_path, config={part: leftover} if part else leftover)
    (finding,) = (one for one in findings(tmp_path) if one.severity == "block")
    assert "no stored tensor is quantized" in finding.found
    assert f"delete the key {part + '.' if part else ''}quantization_config from" in finding.remedy
    path = tmp_path / "b/config.json"
    config = json.loads(path.read_text())
    (config[part] if part else config).pop("quantization_config")
    path.write_text(json.dumps(config))
    assert blocking(findings(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "dtype"), [("qweight", torch.int32), ("weight_scale", torch.float32), ("extra", torch.int8)]
)
def test_a_quantization_config_of_packed_weights_is_not_reported_as_leftover(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    packed = {f"model.layers.0.self_attn.q_proj.{name}": torch.zeros(4, 4, dtype=dtype)}
    pair(tmp_path, tensors={**random_tensors(1), **packed}, config={"quantization_config": {"quant_method": "gptq"}})
    found = [one for one in findings(tmp_path) if one.where == "b: config.json: quantization_config"]
    assert ["delete" in one.remedy for one in found] == [False]


def test_mixed_formats_are_reported_unless_the_recipe_sets_dtype(tmp_path: Path) -> None:
    pair(tmp_path, tensors={name: tensor.bfloat16() for name, tensor in random_tensors(1).items()})
    (finding,) = findings(tmp_path)
    assert (finding.severity, finding.where, finding.found) == ("warn", "b: dtype", "bfloat16 weights")
    assert findings(tmp_path, LINEAR + "dtype: bfloat16\n") == ()
    assert findings(tmp_path, LINEAR + "out_dtype: float32\n") == ()


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [
        ("LlamaTokenizer", "GPT2Tokenizer", True),
        ("LlamaTokenizer", "LlamaTokenizerFast", False),
        ("LlamaTokenizer", "PreTrainedTokenizerFast", False),
        ("LlamaTokenizer", None, False),
    ],
)
def test_a_different_tokenizer_class_is_reported(family: Path, first: str, second: str | None, differ: bool) -> None:
    for name, kind in (("a", first), ("b", second)):
        if kind:
            (family / name / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    expected = [("warn", "b: tokenizer_config.json: tokenizer_class")] if differ else []
    assert [(finding.severity, finding.where) for finding in findings(family)] == expected


@pytest.mark.parametrize("donor_ties", [True, False])
def test_a_head_that_only_one_model_ties_is_reported_and_kept(tmp_path: Path, donor_ties: bool) -> None:
    for name, ties in (("a", donor_ties), ("b", not donor_ties)):
        tensors = random_tensors(0 if name == "a" else 1)
        if ties:
            del tensors["lm_head.weight"]
        save_checkpoint(tmp_path / name, tensors)
    (finding,) = findings(tmp_path)
    assert (finding.severity, finding.where) == ("warn", "b: config.json: tie_word_embeddings")
    merge_text(LINEAR, tmp_path)
    a, b, out = (load(tmp_path / name) for name in ("a", "b", "out"))
    heads = [model.get("lm_head.weight", model["model.embed_tokens.weight"]) for model in (a, b)]
    np.testing.assert_array_equal(out["lm_head.weight"].astype(np.float32), (sum(heads) / 2).astype(np.float32))
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_without_a_counterpart_is_refused(tmp_path: Path) -> None:
    table = torch.zeros(24, 12)
    tied = {name.replace("embed_tokens", "words"): one for name, one in random_tensors(0).items() if "head" not in name}
    tied["model.embed_tokens.weight"] = table
    save_checkpoint(tmp_path / "b", {**tied, "lm_head.weight": table.clone()})
    more = {**tied, "model.more.embed_tokens.weight": table.clone()}
    save_checkpoint(tmp_path / "a", more, config={"tie_word_embeddings": True})
    assert "b: config.json: tie_word_embeddings" in blocking(findings(tmp_path))


def test_all_findings_are_reported_most_severe_first(tmp_path: Path) -> None:
    pair(tmp_path, tokens=30, config={"architectures": ["X"], "quantization_config": {}, "rope_theta": 3})
    found = findings(tmp_path)
    assert len(blocking(found)) >= 3
    order = [("block", "warn", "info").index(finding.severity) for finding in found]
    assert order == sorted(order)


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", random_tensors(0), shards=2)
    path = tmp_path / "a/model.safetensors.index.json"
    names = json.loads(path.read_text())["weight_map"]
    change_json(path, weight_map={**names, "ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(InvalidInput, match="ghost"):
        open_checkpoint(tmp_path / "a")


def test_an_index_and_a_single_file_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", random_tensors(0), shards=2)
    save_checkpoint(tmp_path / "b", random_tensors(0))
    (tmp_path / "b/model.safetensors").rename(tmp_path / "a/model.safetensors")
    with pytest.raises(InvalidInput, match="left over from an earlier save"):
        open_checkpoint(tmp_path / "a")


def test_an_index_of_shards_that_do_not_exist_is_refused_and_deleting_it_helps(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", random_tensors(0))
    index = tmp_path / "a/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(random_tensors(0), "model-00001-of-00002.safetensors")}))
    with pytest.raises(InvalidInput, match=r"delete model.safetensors.index.json if model.safetensors contains"):
        open_checkpoint(tmp_path / "a")
    index.unlink()
    assert open_checkpoint(tmp_path / "a").tensors.keys() == random_tensors(0).keys()


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", random_tensors(0), shards=2)
    (tmp_path / "a/model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"it lists model-00002-of-00002.safetensors[\s\S]*download the missing"):
        open_checkpoint(tmp_path / "a")
