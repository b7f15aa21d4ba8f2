"""Settings of modules, processors and generation that differ between parents are findings. Spelling does not matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family import merge_text
from test_companions import LINEAR, findings
from test_merge_tensors import planned

from mergegate.merge_core import load_recipe, open_checkpoint, plan_with_findings
from mergegate.merge_core.errors import InvalidInput

MODULES = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.sentence_transformer.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.base.modules.Normalize"},
    ],
    "1_Pooling/config.json": {"embedding_dimension": 12, "pooling_mode": "mean", "include_prompt": True},
    "2_Normalize/config.json": {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"},
    "sentence_bert_config.json": {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"},
    "config_sentence_transformers.json": {
        "__version__": {"sentence_transformers": "6.2.0"},
        "model_type": "SentenceTransformer",
        "prompts": {"query": "query: ", "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    },
}
OLDER_MODULES: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 12,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
    },
    "sentence_bert_config.json": {"do_lower_case": False},
    "config_sentence_transformers.json": {
        "__version__": {"sentence_transformers": "2.2.2"},
        "prompts": {"query": "query: "},
        "similarity_fn_name": None,
    },
}
IMAGES = {"image_mean": [0.5, 0.5, 0.5], "size": {"height": 56, "width": 56}, "do_resize": True}
SOUND = {"sampling_rate": 16000, "feature_size": 80, "feature_extractor_type": "WhisperFeatureExtractor"}
WHISPER = {"lang_to_id": {"<|en|>": 5}, "suppress_tokens": [1, 2], "max_length": 448, "alignment_heads": [[0, 1]]}


def write(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))


def found(root: Path, *accepted: str) -> list[tuple[str, str]]:
    """Return severity and location of all findings of a linear merge."""
    recipe = load_recipe(LINEAR)
    opened = {str(ref): open_checkpoint(root / ref.path) for ref in recipe.references()}
    return [(one.severity, one.where) for one in plan_with_findings(recipe, opened, accepted).findings]


def changed(files: dict[str, Any], name: str, **settings: Any) -> dict[str, Any]:
    return {name: {**files[name], **settings}}


def test_files_of_an_older_release_that_mean_the_same_agree(family: Path) -> None:
    write(family / "a", MODULES)
    write(family / "b", OLDER_MODULES)
    assert found(family) == []
    merge_text(LINEAR, family)
    assert json.loads((family / "out" / "modules.json").read_text()) == MODULES["modules.json"]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("name", "settings", "severity"),
    [
        ("config_sentence_transformers.json", {"prompts": {"query": "search: "}}, "block"),
        ("config_sentence_transformers.json", {"prompts": {}}, "block"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "dot"}, "block"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "block"),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "warn"),
        ("1_Pooling/config.json", {"pooling_mode": "cls"}, "block"),
        ("1_Pooling/config.json", {"include_prompt": False}, "block"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "block"),
        ("sentence_bert_config.json", {"max_seq_length": 8}, "warn"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "warn"),
    ],
)
def test_a_module_setting_that_differs_is_a_finding(
    family: Path, older: bool, name: str, settings: dict[str, Any], severity: str
) -> None:
    base = {**OLDER_MODULES, "2_Normalize/config.json": {}} if older else MODULES
    write(family / "a", MODULES)
    write(family / "b", base)
    write(family / "b", changed(base, name, **settings))
    (key,) = settings
    assert found(family) == [(severity, f"b: {name}: {key}")]
    assert found(family, key) == [("info", f"b: {name}: {key}")]


def test_a_missing_or_another_module_blocks(family: Path) -> None:
    write(family / "a", MODULES)
    write(family / "b", MODULES)
    write(family / "b", {"modules.json": MODULES["modules.json"][:2]})
    assert ("block", "b: modules.json") in found(family)
    custom = [*MODULES["modules.json"][:2], {"idx": 2, "path": "2_Normalize", "type": "custom.Normalize"}]
    write(family / "b", {"modules.json": custom})
    assert found(family) == [("block", "b: modules.json")]


def test_a_missing_file_is_one_finding(family: Path) -> None:
    write(family / "a", MODULES)
    write(family / "b", MODULES)
    for name, severity in (("1_Pooling/config.json", "block"), ("config_sentence_transformers.json", "block")):
        file = family / "b" / name
        content = file.read_bytes()
        file.unlink()
        assert found(family) == [(severity, f"b: {name}")]
        file.write_bytes(content)


def test_generation_settings_are_compared_with_those_that_the_result_gets(family: Path) -> None:
    for name, tokens in (("a", [1]), ("b", [2])):
        write(family / name, {"generation_config.json": {"suppress_tokens": tokens}})
    for chosen, other in (("a", "b"), ("b", "a")):
        recipe = f"{LINEAR}tokenizer_source: {chosen}\n"
        assert [one.where for one in findings(family, recipe) if "suppress_tokens" in one.where] == [
            f"{other}: generation_config.json: suppress_tokens"
        ]
        assert json.loads(planned(recipe, family).companions.read("generation_config.json"))["suppress_tokens"] == (
            [1] if chosen == "a" else [2]
        )


def test_a_finding_shows_both_values_and_how_to_accept_them(family: Path) -> None:
    write(family / "a", MODULES)
    write(family / "b", MODULES)
    write(family / "b", changed(MODULES, "config_sentence_transformers.json", prompts={"query": "search: "}))
    (one,) = findings(family)
    assert one.found == '{"query": "search: "}'
    assert one.expected == '{"query": "query: "}, as in a, whose settings the result gets'
    assert "checks.tokenizer.accepted: [prompts]" in one.remedy


def test_a_network_in_a_module_folder_is_refused_with_the_way_to_convert_it(family: Path) -> None:
    write(family / "a", {"modules.json": [{"idx": 0, "path": "0_Transformer", "type": "T"}]})
    with pytest.raises(InvalidInput, match="the first module is in 0_Transformer/") as caught:
        open_checkpoint(family / "a")
    assert "save_pretrained" in caught.value.remedy


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ({"image_mean": [0.4, 0.5, 0.5]}, "block"),
        ({"size": {"height": 28, "width": 28}}, "block"),
        ({"size": 56}, "warn"),
        ({"do_resize": False}, "block"),
        ({"rescale_factor": 0.1}, "warn"),
    ],
)
def test_a_processor_setting_that_differs_is_a_finding(family: Path, settings: dict[str, Any], severity: str) -> None:
    """A setting that one model lacks may be a default, so it does not block."""
    write(family / "a", {"preprocessor_config.json": {**IMAGES, "processor_class": "A"}})
    (key,) = settings
    for name, content in (
        ("preprocessor_config.json", {**IMAGES, **settings, "_valid_processor_keys": ["images"]}),
        ("processor_config.json", {"image_processor": {**IMAGES, **settings}, "processor_class": "B"}),
    ):
        (family / "b" / "preprocessor_config.json").unlink(missing_ok=True)
        write(family / "b", {name: content})
        assert found(family) == [(severity, f"b: {name}: {key}")]
        assert found(family, key) == [("info", f"b: {name}: {key}")]


@pytest.mark.parametrize("value", [False, 0, 5, -1.5, [], ["x"], {}, {"a": 1}])
@pytest.mark.parametrize("key", ["image_processor_type", "video_processor_type", "feature_extractor_type"])
def test_a_processor_class_of_any_type_is_compared(family: Path, key: str, value: Any) -> None:
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        for model, class_name in (("a", "ImageProcessorFast"), ("b", value)):
            write(family / model, {name: {**IMAGES, key: class_name}})
    assert found(family) == [
        ("warn", f"b: {name}: {key}") for name in ("preprocessor_config.json", "video_preprocessor_config.json")
    ]


@pytest.mark.parametrize("key", ["sampling_rate", "feature_size"])
def test_feature_extractors_are_compared(family: Path, key: str) -> None:
    write(family / "a", {"preprocessor_config.json": SOUND})
    write(family / "b", {"processor_config.json": {"feature_extractor": SOUND}})
    assert found(family) == []
    write(family / "b", {"processor_config.json": {"feature_extractor": {**SOUND, key: 1}}})
    assert found(family) == [("block", f"b: processor_config.json: {key}")]


def test_video_processors_are_compared(family: Path) -> None:
    for model, fps in (("a", 2), ("b", 4)):
        write(family / model, {"preprocessor_config.json": IMAGES, "video_preprocessor_config.json": {"fps": fps}})
    assert found(family) == [("block", "b: video_preprocessor_config.json: fps")]


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ({"lang_to_id": {"<|en|>": 6}}, "block"),
        ({"suppress_tokens": []}, "warn"),
        ({"suppress_tokens": [3]}, "warn"),
        ({"alignment_heads": [[1, 1]]}, "warn"),
        ({"forced_decoder_ids": [[1, 4]]}, "warn"),
    ],
)
def test_generation_settings_of_speech_models_are_findings(
    family: Path, settings: dict[str, Any], severity: str
) -> None:
    write(family / "a", {"generation_config.json": WHISPER})
    write(family / "b", {"generation_config.json": {**WHISPER, **settings}})
    (key,) = settings
    assert (severity, f"b: generation_config.json: {key}") in found(family)
    write(family / "b", {"generation_config.json": {**WHISPER, "max_length": 100}})
    assert [severity for severity, _ in found(family)] == ["info"]
