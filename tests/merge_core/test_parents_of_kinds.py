"""Parents of different kinds are refused by name, apart from the networks that the others were trained from."""

from __future__ import annotations

import shutil
from itertools import permutations

import pytest
from tiny_kinds import write
from transformers import AutoConfig, AutoModelForCausalLM

from mergegate.merge_core import Checkpoint, PlannedMerge, load_recipe, open_checkpoint, plan_with_findings
from mergegate.merge_core.architecture import find_kind

LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"
VECTORS = "merge_method: task_arithmetic\nbase_model: a\nmodels: [{model: b}]\nparameters: {weight: 0.5}\n"
# Some have the same classes and sizes, so that only their kind differs.
SAMPLED = ("text generator", "bert embedding", "cross-encoder", "sequence classifier", "t5", "whisper", "llava")
PRETRAINED = ("bare encoder", "masked language model", "causal language model")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("kinds")
    names = [*SAMPLED, "bare encoder", "masked language model", "qwen3 embedding"]
    directories = {name: write(name, root / name.replace(" ", "-")) for name in names}
    config = AutoConfig.from_pretrained(directories["qwen3 embedding"])
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "causal")
    for file in directories["qwen3 embedding"].glob("tokenizer*"):
        shutil.copy(file, root / "causal")
    directories["causal language model"] = root / "causal"
    return {name: open_checkpoint(path) for name, path in directories.items()}


def planned(recipe: str, first: Checkpoint, second: Checkpoint) -> PlannedMerge:
    return plan_with_findings(load_recipe(recipe), {"a": first, "b": second})


@pytest.mark.story
@pytest.mark.parametrize("recipe", [LINEAR, VECTORS], ids=["linear", "task vectors"])
def test_two_models_of_different_kinds_are_refused(recipe: str, checkpoints: dict[str, Checkpoint]) -> None:
    for first, second in permutations(SAMPLED, 2):
        assert planned(recipe, checkpoints[first], checkpoints[second]).blocking, (first, second)


@pytest.mark.parametrize("name", SAMPLED)
def test_two_models_of_one_kind_fit(name: str, checkpoints: dict[str, Checkpoint]) -> None:
    assert planned(LINEAR, checkpoints[name], checkpoints[name]).blocking == ()


def test_the_refusal_names_both_models_and_their_kinds(checkpoints: dict[str, Checkpoint]) -> None:
    for recipe in (LINEAR, VECTORS):
        blocking = planned(recipe, checkpoints["bert embedding"], checkpoints["cross-encoder"]).blocking
        (finding,) = [finding for finding in blocking if finding.where == "b: kind of model"]
        assert (finding.found, finding.expected) == ("a cross-encoder", "an embedding model, like a")


@pytest.mark.parametrize("base", PRETRAINED)
def test_the_base_of_embedding_models_may_be_the_network_they_were_trained_from(
    base: str, checkpoints: dict[str, Checkpoint]
) -> None:
    name = "qwen3 embedding" if base == "causal language model" else "bert embedding"
    result = planned(VECTORS, checkpoints[base], checkpoints[name])
    assert result.blocking == ()
    assert result.plan is not None
    assert find_kind(result.plan.config, result.plan.companions).name == "embedding"


@pytest.mark.parametrize("base", PRETRAINED[1:])
def test_a_language_model_is_not_averaged_with_embedding_models(base: str, checkpoints: dict[str, Checkpoint]) -> None:
    embedding = checkpoints["qwen3 embedding" if base == "causal language model" else "bert embedding"]
    for pair in ((checkpoints[base], embedding), (embedding, checkpoints[base])):
        assert any(finding.where.endswith("kind of model") for finding in planned(LINEAR, *pair).blocking)
    assert planned(VECTORS, embedding, checkpoints[base]).blocking


def test_a_network_without_a_head_is_averaged_with_a_warning_about_its_pooling(
    checkpoints: dict[str, Checkpoint],
) -> None:
    result = planned(LINEAR, checkpoints["bert embedding"], checkpoints["bare encoder"])
    assert result.blocking == ()
    assert "b: modules.json" in [finding.where for finding in result.findings if finding.severity == "warn"]
