"""A result has the same settings for transformers 4 and 5, and a tokenizer's class follows its tokenizer.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from family import LINEAR, TOKENS, change_json, check_recipe, merge_text, plan_recipe, save_tokenizer
from samples import sampled
from tokenizer_samples import TEXTS, byte_level
from transformers import CONFIG_MAPPING, AutoTokenizer

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.checkpoint import Companions
from mergegate.merge_core.plan.companions import with_older_names, with_older_rope
from mergegate.tasks.preflight import segmentation

COMMON = ("llama", "gpt_neox", "gemma3_text", "phi")
# Families whose configuration class rejects another base or scaling, or the defaults that it saved.
STRICT = (
    "bamba", "falcon_h1", "gemma4_assistant", "granitemoehybrid", "mamba2", "nemo_speechlm", "nemotron_h",
    "nemotron_h_omni", "nougat",
)  # fmt: skip
OLDER = {"gpt_neox": ("rotary_emb_base", "rotary_pct"), "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct")}


def parts(config: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, config
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            yield from parts(value, f"{path}{key}.")


def loaded(family: str, content: dict[str, Any]) -> dict[str, Any]:
    config: Any = CONFIG_MAPPING[family]
    return dict(json.loads(config.from_dict(copy.deepcopy(content)).to_json_string(use_diff=False)))


@pytest.mark.parametrize(
    "families", sampled([COMMON, tuple(set(CONFIG_MAPPING) - {*COMMON, *STRICT})], [COMMON]), ids=["common", "others"]
)
def test_rotary_positions_are_the_same_in_both_forms(families: tuple[str, ...]) -> None:
    """Outside ``rope_parameters``, where transformers 4 reads the base and the scaling, are the same values."""
    for family in families:
        config: Any = CONFIG_MAPPING[family]
        saved = json.loads(config().to_json_string(use_diff=False))
        for _, part in parts(saved):
            rope = part.get("rope_parameters") or {}
            for group in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
                group |= {"rope_theta": 123456.0} if "rope_theta" in group else {}
        saved = loaded(family, saved)
        older = with_older_rope(saved)
        assert with_older_rope(older) == older
        read = loaded(family, older)
        for (path, part), (_, result), (_, again) in zip(parts(saved), parts(older), parts(read), strict=True):
            rope = part.get("rope_parameters") or {}
            assert again.get("rope_parameters") == part.get("rope_parameters"), (family, path)
            if not rope or any(isinstance(value, dict) for value in rope.values()) or part.get("rope_scaling"):
                assert all(result.get(key) == part.get(key) for key in ("rope_theta", "rope_scaling")), (family, path)
                continue
            theta, rotated = OLDER.get(part["model_type"], ("rope_theta", "partial_rotary_factor"))
            assert result.get(theta, 10000) == rope.get("rope_theta", 10000), (family, path)
            assert result.get(rotated) == rope.get("partial_rotary_factor", part.get(rotated)), (family, path)
            scaling = {key: rope[key] for key in rope.keys() - {"rope_theta", "partial_rotary_factor", "rope_type"}}
            scaling["rope_type"] = rope.get("rope_type", "default")
            assert scaling.items() <= (result.get("rope_scaling") or scaling).items(), (family, path)


def test_scaling_has_the_keys_that_the_family_accepts() -> None:
    factors = {"short_factor": [1.0], "long_factor": [2.0]}
    rope = {"rope_theta": 5e5, "rope_type": "longrope", "factor": 4.0, **factors}
    for family, scaling in (("phi3", {"type": "longrope"}), ("llama", {"rope_type": "longrope", "factor": 4.0})):
        older = with_older_rope({"model_type": family, "rope_parameters": rope})
        assert (older["rope_theta"], older["rope_scaling"]) == (5e5, {**scaling, **factors})


@pytest.mark.parametrize(
    ("saved", "written"),
    [
        ({"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "is_local": True},
         {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ({"extra_special_tokens": []}, {}),
        ({"extra_special_tokens": ["</s>"], "local_files_only": False}, {"additional_special_tokens": ["</s>"]}),
        ({"extra_special_tokens": {"end": "</s>"}}, {"extra_special_tokens": {"end": "</s>"}}),
        ({"tokenizer_class": "Qwen2Tokenizer", "additional_special_tokens": ["</s>"]}, None),
    ],
)  # fmt: skip
def test_a_tokenizer_has_names_that_transformers_4_and_5_load_alike(
    tmp_path: Path, saved: dict[str, Any], written: dict[str, Any] | None
) -> None:
    saved = {"eos_token": "</s>", "model_max_length": 64, **saved}
    tokenizers, content = [], json.dumps(saved)
    for name, files in {"saved": (before := Companions({"tokenizer_config.json": content.encode()})),
                        "written": (after := with_older_names(before))}.items():  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer_config.json").write_bytes(files.read("tokenizer_config.json"))
        byte_level().save(str(tmp_path / name / "tokenizer.json"))
        tokenizers.append(AutoTokenizer.from_pretrained(tmp_path / name))
    if written is None:
        assert after.sources == before.sources
    else:
        assert after.json("tokenizer_config.json") == {"eos_token": "</s>", "model_max_length": 64, **written}
    first, second = tokenizers
    assert [first(text)["input_ids"] for text in TEXTS] == [second(text)["input_ids"] for text in TEXTS]
    assert first.all_special_tokens == second.all_special_tokens


def test_the_files_of_a_merge_suit_both_versions(family: Path) -> None:
    for name in "ab":
        change_json(family / name / "config.json", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
        settings = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": []}
        (family / name / "tokenizer_config.json").write_text(json.dumps(settings))
    merge_text(LINEAR, family)
    assert json.loads((family / "out/config.json").read_text())["rope_theta"] == 5e5
    content = json.loads((family / "out/tokenizer_config.json").read_text())
    assert content == {"tokenizer_class": "PreTrainedTokenizerFast"}
    nested = {kind: {"rope_theta": base, "rope_type": "default"} for kind, base in (("full", 1e6), ("sliding", 1e4))}
    change_json(family / "a/config.json", rope_parameters=nested)
    found = [(one.severity, one.where, one.found) for one in check_recipe(LINEAR, family).findings]
    assert ("info", "a: config.json: rope_parameters", "different values for full, sliding") in found


@pytest.mark.parametrize(
    ("eos", "config", "generation", "contradicts"),
    [
        (1, 1, 1, False), (1, 1, [1, 2], False), (1, 2, [1, 2], False), (1, None, None, False),
        (1, [1, 2], None, False), (1, 2, 2, True), (1, 1, 2, True), (1, 2, None, True), (None, 1, 2, True),
        (None, [1, 2], 1, True),
    ],
)  # fmt: skip
def test_files_that_disagree_about_the_end_are_a_finding_with_all_values(
    family: Path, eos: int | None, config: object, generation: object, contradicts: bool
) -> None:
    tokens = [f"t{number}" for number in range(TOKENS)]
    for name in "ab":
        save_tokenizer(family / name, tokens)
        settings = {"eos_token": {"content": f"t{eos}"}} if eos is not None else {}
        (family / name / "tokenizer_config.json").write_text(json.dumps(settings))
        change_json(family / name / "config.json", eos_token_id=config)
        if generation is not None:
            (family / name / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    found = [one for one in check_recipe(LINEAR, family).findings if "end tokens" in one.found]
    assert len(found) == 2 * contradicts
    for one in found:
        for value, file in ((eos, "tokenizer_config"), (config, "config"), (generation, "generation_config")):
            for number in value if isinstance(value, list) else [value] if value is not None else []:
                assert f"{number} ('t{number}')" in one.found.partition(f"{file}.json has")[2]
    for name in "ab":  # Models without a head generate no text.
        change_json(family / name / "tokenizer_config.json", add_eos_token=True)
    change_json(family / "a/config.json", architectures=["LlamaModel"])
    found = [
        one for one in check_recipe(LINEAR, family).findings if one.where.startswith(("a: gen", "a: tok", "b: tok"))
    ]
    assert [one.where for one in found] == ["b: tokenizer_config.json: add_eos_token"]


CLASSES = {name for name in transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING_NAMES.values() if name}


@pytest.mark.parametrize("classes", sampled([("GPT2Tokenizer",), tuple(CLASSES)], [("GPT2Tokenizer",)]), ids=len)
def test_a_class_that_replaces_rules_of_the_file_is_a_finding(
    family: Path, monkeypatch: pytest.MonkeyPatch, classes: tuple[str, ...]
) -> None:
    monkeypatch.setattr(
        segmentation, "call_model_process", lambda function, arguments, **_: function(*arguments, lambda *_: None)
    )

    def findings() -> list[str]:
        models = {each: open_checkpoint(family / each) for each in "ab"}
        found = segmentation.tokenizer_class_findings(plan_recipe(LINEAR, family), models)
        return [one.where for one in found]

    own_ids = [byte_level().encode(text, add_special_tokens=False).ids for text in TEXTS]
    compared = 0
    for name in ("PreTrainedTokenizerFast", *classes):
        byte_level().save(str(family / "a/tokenizer.json"))
        (family / "a/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        replaces = findings()
        try:
            tokenizer = AutoTokenizer.from_pretrained(family / "a")
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
        except Exception:  # The class cannot read byte-level BPE.
            continue
        if getattr(tokenizer, "is_fast", False):  # Other classes do not read tokenizer.json.
            assert ids == own_ids or replaces == ["a: tokenizer_config.json: tokenizer_class"], name
            tokenizer.save_pretrained(family / "a")  # Now the file has the rules of the class.
            assert findings() == [], name
            compared += 1
    assert compared > min(len(classes), 20)
