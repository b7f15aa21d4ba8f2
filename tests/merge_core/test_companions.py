"""A merge carries over the files next to its parents' weights, or reports which ones it leaves out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from family import merge_text, save_family
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mergegate.merge_core import Finding, load_recipe, open_checkpoint, plan_with_findings
from mergegate.merge_core.checkpoint import companion_kind, has_vocabulary, is_copyable

LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"
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
    *("runs/events.out.tfevents.1", "checkpoint-500/model.safetensors"),
)
FILES = {
    "tekken.json": '{"config": {}}',
    "preprocessor_config.json": '{"size": 1}',
    "labels.json": '["x"]',
    "label.txt": "x",
    "modeling_x.py": "x = 1",
    "lookup.npz": "x",
    "generation_config.json": '{"top_k": 3}',
    **POOLING,
}


def write(directory: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content)


def findings(root: Path, recipe: str = LINEAR) -> tuple[Finding, ...]:
    parsed = load_recipe(recipe)
    opened = {str(ref): open_checkpoint(root / ref.path) for ref in parsed.references()}
    return plan_with_findings(parsed, opened).findings


def blocked_files(root: Path) -> set[str]:
    """Return the models and files in findings, and require that all findings block."""
    found = findings(root)
    assert {one.severity for one in found} == {"block"}
    return {": ".join(one.where.split(": ")[:2]) for one in found}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_leftovers_are_neither_carried_nor_reported(family: Path, name: str) -> None:
    write(family / "a", {name: "x"})
    assert findings(family) == ()
    merge_text(LINEAR, family)
    assert not (family / "out" / name).exists()


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


def test_only_small_plain_files_of_known_kinds_are_carried() -> None:
    assert is_copyable("1_Pooling/config.json")
    assert is_copyable("additional_chat_templates/tool_use.jinja")
    assert not is_copyable("1_Pooling/notes.md")
    assert not is_copyable("config.json")
    assert not is_copyable("model.safetensors")
    assert has_vocabulary(["spiece.model"])
    assert not has_vocabulary(["tokenizer_config.json", "special_tokens_map.json"])
