"""A merge keeps the files next to its parents' weights or reports them, and reports settings that differ in meaning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from family import LINEAR, check_recipe, merge_text, plan_recipe, save_family
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mergegate.merge_core import Finding, open_checkpoint
from mergegate.merge_core.checkpoint import companion_kind, has_vocabulary, is_copyable
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints.model import find_model_problem

POOLING = {
    "modules.json": '[{"idx": 0, "path": "", "type": "t.Transformer"}, {"idx": 1, "path": "1_Pooling", "type": "t.P"}]',
    "1_Pooling/config.json": '{"word_embedding_dimension": 12, "pooling_mode_mean_tokens": true}',
    "2_Dense/config.json": '{"in_features": 12, "out_features": 12}',
    "sentence_bert_config.json": '{"max_seq_length": 64}',
    "config_sentence_transformers.json": '{"__version__": {"transformers": "4"}, "prompts": {"q": "1"}}',
}
# A parent is complete without these files: other layouts of the weights, training states, pictures, the model card.
LEFTOVERS = (
    *("README.md", "LICENSE", "NOTICE.txt", ".gitattributes", "mergekit_config.yml", "logo.png", "assets/plot.png"),
    *("pytorch_model.bin", "model.q4.gguf", "tf_model.h5", "onnx/model.onnx", "params.json", "original/params.json"),
    *("optimizer.pt", "training_args.bin", "trainer_state.json", "rng_state_0.pth", "all_results.json"),
    *(
        "model.fp16.safetensors",
        "pytorch_model-00001-of-00002.bin",
        "open_clip_pytorch_model.bin",
        "consolidated.00.pth",
    ),
    *("runs/events.out.tfevents.1", "checkpoint-500/model.safetensors"),
)
FILES = {
    "tekken.json": '{"config": {}}', "preprocessor_config.json": '{"size": 1}', "labels.json": '["x"]',
    "label.txt": "x", "modeling_x.py": "x = 1", "lookup.npz": "x", "generation_config.json": '{"top_k": 3}', **POOLING,
}  # fmt: skip


def write(directory: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content)


def findings(root: Path, recipe: str = LINEAR) -> tuple[Finding, ...]:
    return check_recipe(recipe, root).findings


def blocked_files(root: Path) -> set[str]:
    """Return the models and files in findings, and require that all findings block."""
    found = findings(root)
    assert {one.severity for one in found} == {"block"}
    return {": ".join(one.where.split(": ")[:2]) for one in found}


OTHER_WEIGHTS = ("mm_projector.bin", "adapter.eng.bin", "head.safetensors", "speaker.pt", "model_head.safetensors")


def test_weights_under_other_names_are_copied_or_named(family: Path) -> None:
    write(family / "a", dict.fromkeys((*OTHER_WEIGHTS, "adapter.eng.safetensors"), "x"))
    write(family / "b", {"adapter.eng.safetensors": "y", "adapter.deu.safetensors": "y"})
    found = findings(family)
    assert {one.severity for one in found} == {"warn"}
    text = "".join(one.found for one in found)
    assert all(name in text for name in (*OTHER_WEIGHTS, "adapter.eng.safetensors", "adapter.deu.safetensors"))
    merge_text(LINEAR, family)
    assert (family / "out" / "adapter.eng.safetensors").read_text() == "x"  # The file of the first model.


def test_leftovers_are_neither_carried_nor_reported(family: Path) -> None:
    write(family / "a", dict.fromkeys(LEFTOVERS, "x"))
    assert findings(family) == ()
    merge_text(LINEAR, family)
    assert not any((family / "out" / name).exists() for name in LEFTOVERS)


@pytest.mark.story
@settings(max_examples=40, deadline=None)
@example({**dict.fromkeys(POOLING, "a"), "modules.json": "differ", "sentence_bert_config.json": "b"})
@example(dict.fromkeys(POOLING, "b"))
@given(st.dictionaries(st.sampled_from(sorted(FILES)), st.sampled_from(["both", "a", "b", "differ"])))
def test_every_parent_file_is_carried_or_reported(
    tmp_path_factory: pytest.TempPathFactory, where: dict[str, str]
) -> None:
    root = save_family(tmp_path_factory.mktemp("files"))
    for name, holder in where.items():
        if holder != "b":
            write(root / "a", {name: FILES[name]})
        if holder != "a":
            write(root / "b", {name: FILES[name] if holder != "differ" else FILES[name].replace("1", "7") + " "})
    found = findings(root)
    merge_text(LINEAR, root)
    for parent in "ab":
        for path in (root / parent).rglob("*"):
            name = path.relative_to(root / parent).as_posix()
            if not path.is_file() or companion_kind(name) in (None, "tokenizer"):
                continue
            result = root / "out" / name
            is_carried = result.exists() and result.read_bytes().strip() == path.read_bytes().strip()
            is_reported = any(name in f"{one.where} {one.found}" for one in found)
            assert is_carried or is_reported, (name, where, found)


@pytest.mark.parametrize("donor", ["a", "plain"])
def test_equal_modules_of_embedding_models_are_carried(family: Path, donor: str) -> None:
    for name in "ab":
        write(family / name, POOLING)
    write(family / "b", {name: POOLING[name].replace("4", "5") for name in ["config_sentence_transformers.json"]})
    shutil.copytree(family / "base", family / "plain")
    text = f"merge_method: task_arithmetic\nbase_model: {donor}\nmodels: [{{model: a}}, {{model: b}}]\n"
    assert findings(family, f"{text}parameters: {{weight: 1}}\n") == ()
    merge_text(f"{text}parameters: {{weight: 1}}\n", family)
    for name, content in POOLING.items():
        assert (family / "out" / name).read_text() == content


@pytest.mark.parametrize("name", [name for name in POOLING if "config_" not in name and "_bert" not in name])
def test_different_modules_block_the_merge(family: Path, name: str) -> None:
    for parent in "ab":
        write(family / parent, POOLING)
    write(family / "b", {name: POOLING[name].replace("1", "2").replace("weights", "other weights").replace("t.T", "u")})
    assert blocked_files(family) == {f"b: {name}"}
    (family / "b" / name).unlink()
    if name != "modules.json":
        assert blocked_files(family) == {f"b: {name}"}


def test_a_module_in_an_unsupported_directory_blocks_the_merge(family: Path) -> None:
    for parent in "ab":
        modules = '[{"path": "", "type": "T"}, {"path": "pooling", "type": "P"}]'
        write(family / parent, {"modules.json": modules, "pooling/config.json": "{}"})
    blocking = [one for one in findings(family) if one.severity == "block"]
    assert [one.found for one in blocking] == ["a merge does not copy the module in pooling/"]


@pytest.mark.parametrize("vocabulary", ["tekken.json", "tokenizer.model", "vocab.txt", "x.tiktoken", "tokenizer.json"])
def test_a_lost_tokenizer_blocks_the_merge(family: Path, vocabulary: str) -> None:
    for parent in "ab":
        (family / parent / "tokenizer.json").unlink()
    content = json.dumps({"model": {"vocab": {"x": 0}}})
    write(family / "b", {vocabulary: content})
    assert [(one.severity, one.where, one.found) for one in findings(family)] == [("block", "a", "no tokenizer")]
    write(family / "a", {vocabulary: content})
    assert findings(family) == ()
    merge_text(LINEAR, family)
    assert (family / "out" / vocabulary).read_text() == content


def test_files_of_one_kind_are_one_finding(family: Path) -> None:
    for parent in "bc":
        write(family / parent, {"x.json": "1", "y.npz": "1", "chat_templates/x.jinja": ""})
    (found,) = findings(family, LINEAR.replace("{model: b}", "{model: b}, {model: c}"))
    assert found.severity == "warn"
    assert found.found == "not in the result: x.json, chat_templates/, y.npz; c: x.json, chat_templates/, y.npz"


@pytest.mark.parametrize(
    ("name", "is_carried"),
    [
        *((name, True) for name in ("1_Pooling/config.json", "additional_chat_templates/tool_use.jinja")),
        *((name, False) for name in ("1_Pooling/notes.md", "config.json", "model.safetensors")),
    ],
)
def test_only_small_plain_files_of_known_kinds_are_carried(name: str, is_carried: bool) -> None:
    assert is_copyable(name) is is_carried
    assert has_vocabulary(["spiece.model", name])
    assert not has_vocabulary(["tokenizer_config.json", "special_tokens_map.json", name])


IMAGES = {"image_mean": [0.5, 0.5, 0.5], "size": {"height": 56, "width": 56}, "do_resize": True}
SOUND = {"sampling_rate": 16000, "feature_size": 80, "feature_extractor_type": "WhisperFeatureExtractor"}
WHISPER = {"lang_to_id": {"<|en|>": 5}, "suppress_tokens": [1, 2], "max_length": 448, "alignment_heads": [[0, 1]]}


def write_json(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))


def found(root: Path, *accepted: str) -> list[tuple[str, str]]:
    """Return severity and location of all findings of a linear merge."""
    return [(one.severity, one.where) for one in check_recipe(LINEAR, root, *accepted).findings]


TYPES = (
    "sentence_transformers.base.modules.transformer.Transformer",
    "sentence_transformers.sentence_transformer.Pooling",
)


def modules(*types: str) -> list[dict[str, Any]]:
    """Return the content of modules.json with a network, pooling and normalization."""
    paths = ("", "1_Pooling", "2_Normalize")
    return [{"idx": n, "name": str(n), "path": paths[n], "type": one} for n, one in enumerate(types)]


MODULES = {
    "modules.json": modules(*TYPES, "sentence_transformers.base.modules.Normalize"),
    "1_Pooling/config.json": {"embedding_dimension": 12, "pooling_mode": "mean", "include_prompt": True},
    "2_Normalize/config.json": {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"},
    "sentence_bert_config.json": {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"},
    "config_sentence_transformers.json": {
        "__version__": {"sentence_transformers": "6.2.0"}, "model_type": "SentenceTransformer",
        "prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine",
    },
}  # fmt: skip
OLDER_MODULES: dict[str, Any] = {
    "modules.json": modules(*(f"sentence_transformers.models.{k}" for k in ("Transformer", "Pooling", "Normalize"))),
    "1_Pooling/config.json": {
        "word_embedding_dimension": 12, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
    },
    "sentence_bert_config.json": {"do_lower_case": False},
    "config_sentence_transformers.json": {
        "__version__": {"sentence_transformers": "2.2.2"}, "prompts": {"query": "query: "}, "similarity_fn_name": None,
    },
}  # fmt: skip


def changed(files: dict[str, Any], name: str, **settings: Any) -> dict[str, Any]:
    return {name: {**files[name], **settings}}


def test_files_of_an_older_release_that_mean_the_same_agree(family: Path) -> None:
    write_json(family / "a", MODULES)
    write_json(family / "b", OLDER_MODULES)
    assert found(family) == []
    merge_text(LINEAR, family)
    assert json.loads((family / "out" / "modules.json").read_text()) == MODULES["modules.json"]


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
    family: Path, name: str, settings: dict[str, Any], severity: str
) -> None:
    write_json(family / "a", MODULES)
    (key,) = settings
    for base in (MODULES, {**OLDER_MODULES, "2_Normalize/config.json": {}}):
        write_json(family / "b", {**base, **changed(base, name, **settings)})
        assert found(family) == [(severity, f"b: {name}: {key}")]
    assert found(family, key) == [("info", f"b: {name}: {key}")]


def test_a_missing_or_another_module_blocks(family: Path) -> None:
    write_json(family / "a", MODULES)
    write_json(family / "b", MODULES)
    write_json(family / "b", {"modules.json": MODULES["modules.json"][:2]})
    assert ("block", "b: modules.json") in found(family)
    custom = [*MODULES["modules.json"][:2], {"idx": 2, "path": "2_Normalize", "type": "custom.Normalize"}]
    write_json(family / "b", {"modules.json": custom})
    assert found(family) == [("block", "b: modules.json")]


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "config_sentence_transformers.json"])
def test_a_missing_file_is_one_finding(family: Path, name: str) -> None:
    write_json(family / "a", MODULES)
    write_json(family / "b", {file: content for file, content in MODULES.items() if file != name})
    assert found(family) == [("block", f"b: {name}")]


def test_generation_settings_are_compared_with_those_that_the_result_gets(family: Path) -> None:
    for name, tokens in (("a", [1]), ("b", [2])):
        write_json(family / name, {"generation_config.json": {"suppress_tokens": tokens}})
    for chosen, other in (("a", "b"), ("b", "a")):
        recipe = f"{LINEAR}tokenizer_source: {chosen}\n"
        assert [one.where for one in findings(family, recipe) if "suppress_tokens" in one.where] == [
            f"{other}: generation_config.json: suppress_tokens"
        ]
        assert json.loads(plan_recipe(recipe, family).companions.read("generation_config.json")) == {
            "suppress_tokens": [1] if chosen == "a" else [2]
        }


def test_a_finding_shows_both_values_and_how_to_accept_them(family: Path) -> None:
    write_json(family / "a", MODULES)
    write_json(family / "b", MODULES)
    write_json(family / "b", changed(MODULES, "config_sentence_transformers.json", prompts={"query": "search: "}))
    (one,) = findings(family)
    assert one.found == '{"query": "search: "}'
    assert one.expected == '{"query": "query: "}, as in a, whose settings the result gets'
    assert "checks.tokenizer.accepted: [prompts]" in one.remedy


@pytest.mark.parametrize(
    ("path", "module", "reason", "remedy"),
    [
        ("0_Transformer", "T", "the first module is in 0_Transformer/", "save_pretrained"),
        ("", "static_embedding.StaticEmbedding", "the first module is StaticEmbedding, which has no", "average tables"),
        (".", "router.Router", "the first module is Router, which has no config.json", "networks in its folders"),
    ],
)
def test_a_model_whose_first_module_is_no_network_is_refused(
    family: Path, path: str, module: str, reason: str, remedy: str
) -> None:
    write_json(family / "a", {"modules.json": [{"idx": 0, "path": path, "type": module}]})
    if path == ".":
        assert open_checkpoint(family / "a")  # The network is next to modules.json.
    (family / "a/config.json").unlink()
    assert find_model_problem("a", family / "a") is None  # Opening the model names the reason.
    with pytest.raises(InvalidInput, match=reason) as caught:
        open_checkpoint(family / "a")
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ({"image_mean": [0.4, 0.5, 0.5]}, "block"), ({"size": {"height": 28, "width": 28}}, "block"),
        ({"size": 56}, "warn"), ({"do_resize": False}, "block"), ({"rescale_factor": 0.1}, "warn"),
    ],
)  # fmt: skip
def test_a_processor_setting_that_differs_is_a_finding(family: Path, settings: dict[str, Any], severity: str) -> None:
    """A setting that one model lacks may be a default, so it does not block."""
    write_json(family / "a", {"preprocessor_config.json": {**IMAGES, "processor_class": "A"}})
    (key,) = settings
    for name, content in (
        ("preprocessor_config.json", {**IMAGES, **settings, "_valid_processor_keys": ["images"]}),
        ("processor_config.json", {"image_processor": {**IMAGES, **settings}, "processor_class": "B"}),
    ):
        (family / "b" / "preprocessor_config.json").unlink(missing_ok=True)
        write_json(family / "b", {name: content})
        assert found(family) == [(severity, f"b: {name}: {key}")]
        assert found(family, key) == [("info", f"b: {name}: {key}")]


@pytest.mark.parametrize("key", ["image_processor_type", "video_processor_type", "feature_extractor_type"])
def test_a_processor_class_of_any_type_is_compared(family: Path, key: str) -> None:
    names = ("preprocessor_config.json", "video_preprocessor_config.json")
    write_json(family / "a", {name: {**IMAGES, key: "ImageProcessorFast"} for name in names})
    for value in (False, 5, -1.5, [], ["x"], {"a": 1}):
        write_json(family / "b", {name: {**IMAGES, key: value} for name in names})
        assert found(family) == [("warn", f"b: {name}: {key}") for name in names]


@pytest.mark.parametrize("key", ["sampling_rate", "feature_size"])
def test_feature_extractors_are_compared(family: Path, key: str) -> None:
    write_json(family / "a", {"preprocessor_config.json": SOUND})
    write_json(family / "b", {"processor_config.json": {"feature_extractor": SOUND}})
    assert found(family) == []
    write_json(family / "b", {"processor_config.json": {"feature_extractor": {**SOUND, key: 1}}})
    assert found(family) == [("block", f"b: processor_config.json: {key}")]


def test_video_processors_are_compared(family: Path) -> None:
    for model, fps in (("a", 2), ("b", 4)):
        write_json(family / model, {"preprocessor_config.json": IMAGES, "video_preprocessor_config.json": {"fps": fps}})
    assert found(family) == [("block", "b: video_preprocessor_config.json: fps")]


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ({"lang_to_id": {"<|en|>": 6}}, "block"), ({"suppress_tokens": []}, "warn"), ({"suppress_tokens": [3]}, "warn"),
        ({"alignment_heads": [[1, 1]]}, "warn"), ({"forced_decoder_ids": [[1, 4]]}, "warn"),
    ],
)  # fmt: skip
def test_generation_settings_of_speech_models_are_findings(
    family: Path, settings: dict[str, Any], severity: str
) -> None:
    write_json(family / "a", {"generation_config.json": WHISPER})
    write_json(family / "b", {"generation_config.json": {**WHISPER, **settings}})
    (key,) = settings
    assert (severity, f"b: generation_config.json: {key}") in found(family)
    write_json(family / "b", {"generation_config.json": {**WHISPER, "max_length": 100}})
    assert [severity for severity, _ in found(family)] == ["info"]
