"""Kinds of models are those of transformers, and a merge of models of different kinds is refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from tiny_kinds import write
from transformers import AutoConfig, AutoModelForCausalLM

from mergegate import merge_core
from mergegate.merge_core.architecture import find_kind
from mergegate.merge_core.checkpoint import Companions

KINDS = Path(merge_core.architecture.__file__).parent / "model_kinds.json"
# Entries of model_kinds.json in order: task on the Hub, kind, loader, forms of tasks, modalities, and mappings.
TEXT, PICTURES, SOUND = ("text",), ("text", "pictures"), ("sound",)
SPEECH, VISION = "automatic-speech-recognition", "vision-language"
Entry = tuple[str, str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def unjudged(tag: str, *mappings: str, kind: str = "other", loader: str | None = None) -> Entry:
    """Return an entry of a kind without tasks, whose loader has the name of its mapping."""
    words = "".join(word.capitalize() for word in mappings[0].split("_"))
    return tag, kind, f"AutoModelFor{words}" if loader is None else loader, (), (), mappings


ENTRIES: tuple[Entry, ...] = (
    (SPEECH, "speech", "AutoModelForSpeechSeq2Seq", ("transcription",), SOUND, ("SPEECH_SEQ_2_SEQ unprompted",)),
    (SPEECH, "speech", "AutoModelForCTC", ("transcription",), SOUND, ("CTC",)),
    (SPEECH, "speech", "", (), SOUND, ("RNNT", "TDT")),
    # Language models that transcribe if a prompt tells them to. Transcription tasks have no prompts.
    (SPEECH, "speech", "AutoModelForMultimodalLM", TEXT, SOUND, ("SPEECH_SEQ_2_SEQ prompted",)),
    ("image-text-to-text", VISION, "AutoModelForImageTextToText", PICTURES, ("pictures",), ("IMAGE_TEXT_TO_TEXT",)),
    ("audio-text-to-text", "speech", "AutoModelForMultimodalLM", TEXT, SOUND, ("MULTIMODAL_LM sound",)),
    ("audio-text-to-text", "speech", "", (), SOUND, ("SEQ_TO_SEQ_CAUSAL_LM sound",)),
    ("any-to-any", VISION, "AutoModelForMultimodalLM", PICTURES, ("pictures", "sound"), ("MULTIMODAL_LM",)),
    ("text-generation", "text generator", "AutoModelForCausalLM", TEXT, (), ("CAUSAL_LM",)),
    ("text2text-generation", "sequence-to-sequence", "AutoModelForSeq2SeqLM", TEXT, (), ("SEQ_TO_SEQ_CAUSAL_LM",)),
    unjudged("text-classification", "SEQUENCE_CLASSIFICATION", kind="classifier"),
    unjudged("token-classification", "TOKEN_CLASSIFICATION", kind="classifier"),
    unjudged("question-answering", "QUESTION_ANSWERING"),
    unjudged("multiple-choice", "MULTIPLE_CHOICE"),
    unjudged("fill-mask", "MASKED_LM", loader="AutoModelForMaskedLM"),
    unjudged("image-classification", "IMAGE_CLASSIFICATION", kind="classifier"),
    unjudged("video-classification", "VIDEO_CLASSIFICATION", kind="classifier"),
    unjudged("audio-classification", "AUDIO_CLASSIFICATION", kind="classifier"),
    unjudged("zero-shot-image-classification", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    unjudged("object-detection", "OBJECT_DETECTION"),
    unjudged("zero-shot-object-detection", "ZERO_SHOT_OBJECT_DETECTION"),
    unjudged(
        "image-segmentation", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", loader=""
    ),
    unjudged("mask-generation", "MASK_GENERATION"),
    unjudged("depth-estimation", "DEPTH_ESTIMATION"),
    unjudged("visual-question-answering", "VISUAL_QUESTION_ANSWERING"),
    unjudged("text-to-speech", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", loader=""),
    unjudged("time-series-forecasting", "TIME_SERIES_PREDICTION", loader=""),
    unjudged("image-feature-extraction", "IMAGE", loader="AutoModel"),
    unjudged("feature-extraction", "BASE", loader="AutoModel"),
)


@pytest.mark.story
def test_kinds_lists_the_classes_of_transformers() -> None:
    expected = list(generated_entries())
    if os.environ.get("UPDATE_KINDS"):
        KINDS.write_text(json.dumps(expected, indent=1) + "\n")
    assert json.loads(KINDS.read_text()) == expected, "run with UPDATE_KINDS=1 to generate the file"


def generated_entries() -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for tag, kind, loader, forms, modalities, mappings in ENTRIES:
        classes = sorted({name for mapping in mappings for name in classes_in(mapping)} - seen)
        seen |= set(classes)
        fields = {"pipeline_tag": tag, "kind": kind, "loader": loader, "task_forms": list(forms)}
        # Without a class, transformers loads the default class of a model type that has one for text.
        types = sorted(mapping_of(mappings[0])) if kind in ("vision-language", "text generator") else []
        yield {**fields, "modalities": list(modalities), "classes": classes, "model_types": types}


def classes_in(mapping: str) -> set[str]:
    """Return the classes in one of transformers' mappings, or those of a kind that a second word names.

    ``sound`` hears and does not see, ``unprompted`` transcribes without a prompt, ``prompted`` needs one.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, _, only = mapping.partition(" ")
    classes: set[str] = set()
    for model_type, value in mapping_of(name).items():
        names = set(value if isinstance(value, (list, tuple)) else [value])
        if only == "sound":
            parts = getattr(CONFIG_MAPPING[model_type], "sub_configs", {})
            if "audio_config" not in parts or any("vision" in part for part in parts):
                continue
        elif only:
            hears = {each for each in names if getattr(transformers, each).main_input_name != "input_ids"}
            languages = {each for each in names - hears if model_type in mapping_of("MULTIMODAL_LM")}
            names = hears if only == "unprompted" else languages
        classes |= names
    return classes


def mapping_of(name: str) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    table = "MODEL_MAPPING_NAMES" if name == "BASE" else f"MODEL_FOR_{name}_MAPPING_NAMES"
    return dict(getattr(modeling_auto, table))


def test_a_class_in_several_mappings_has_its_widest_kind() -> None:
    kind = find_kind({"architectures": ["Gemma3ForConditionalGeneration"]}, Companions())
    assert (kind.name, kind.pipeline_tag) == ("vision-language", "image-text-to-text")


LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"
VECTORS = "merge_method: task_arithmetic\nbase_model: a\nmodels: [{model: b}]\nparameters: {weight: 0.5}\n"
# Some have the same classes and sizes, so that only their kind differs.
SAMPLED = ("text generator", "bert embedding", "cross-encoder", "sequence classifier", "t5", "whisper", "llava")
PRETRAINED = ("bare encoder", "masked language model", "causal language model")


Checkpoints = Callable[[str], merge_core.Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return a function that writes a model of a kind once and opens it."""
    root = tmp_path_factory.mktemp("kinds")

    @cache
    def checkpoint(name: str) -> merge_core.Checkpoint:
        if name != "causal language model":
            return merge_core.open_checkpoint(write(name, root / name))
        embedding = checkpoint("qwen3 embedding").directory
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(embedding)).save_pretrained(root / name)
        for file in embedding.glob("tokenizer*"):
            shutil.copy(file, root / name)
        return merge_core.open_checkpoint(root / name)

    return checkpoint


def planned(recipe: str, first: merge_core.Checkpoint, second: merge_core.Checkpoint) -> merge_core.PlannedMerge:
    return merge_core.plan_with_findings(merge_core.load_recipe(recipe), {"a": first, "b": second})


@pytest.mark.story
@pytest.mark.parametrize("recipe", [LINEAR, VECTORS], ids=["linear", "task vectors"])
def test_two_models_of_different_kinds_are_refused(recipe: str, checkpoints: Checkpoints) -> None:
    for first, second in permutations(SAMPLED, 2):
        assert planned(recipe, checkpoints(first), checkpoints(second)).blocking, (first, second)


def test_the_refusal_names_both_models_and_their_kinds(checkpoints: Checkpoints) -> None:
    for recipe in (LINEAR, VECTORS):
        blocking = planned(recipe, checkpoints("bert embedding"), checkpoints("cross-encoder")).blocking
        (finding,) = [finding for finding in blocking if finding.where == "b: kind of model"]
        assert (finding.found, finding.expected) == ("a cross-encoder", "an embedding model, like a")


@pytest.mark.parametrize("base", PRETRAINED)
def test_the_base_of_embedding_models_may_be_the_network_they_were_trained_from(
    base: str, checkpoints: Checkpoints
) -> None:
    name = "qwen3 embedding" if base == "causal language model" else "bert embedding"
    result = planned(VECTORS, checkpoints(base), checkpoints(name))
    assert result.blocking == ()
    assert result.plan is not None
    assert find_kind(result.plan.config, result.plan.companions).name == "embedding"


@pytest.mark.parametrize("base", PRETRAINED[1:])
def test_a_language_model_is_not_averaged_with_embedding_models(base: str, checkpoints: Checkpoints) -> None:
    embedding = checkpoints("qwen3 embedding" if base == "causal language model" else "bert embedding")
    for pair in ((checkpoints(base), embedding), (embedding, checkpoints(base))):
        assert any(finding.where.endswith("kind of model") for finding in planned(LINEAR, *pair).blocking)
    assert planned(VECTORS, embedding, checkpoints(base)).blocking


def test_a_network_without_a_head_is_averaged_with_a_warning_about_its_pooling(checkpoints: Checkpoints) -> None:
    result = planned(LINEAR, checkpoints("bert embedding"), checkpoints("bare encoder"))
    assert result.blocking == ()
    assert "b: modules.json" in [finding.where for finding in result.findings if finding.severity == "warn"]
