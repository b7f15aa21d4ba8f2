"""Compare model_kinds.json with the mappings of the installed transformers, and kinds of directories with the rule."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mergegate.merge_core import architecture
from mergegate.merge_core.architecture import find_kind
from mergegate.merge_core.checkpoint import Companions

KINDS = Path(architecture.__file__).parent / "model_kinds.json"
# Entries of model_kinds.json in order: task on the Hub, kind, loader, forms of tasks, modalities, and mappings.
TEXT, PICTURES, SOUND = ("text",), ("text", "pictures"), ("sound",)
ENTRIES: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "automatic-speech-recognition",
        "speech",
        "AutoModelForSpeechSeq2Seq",
        ("transcription",),
        SOUND,
        ("SPEECH_SEQ_2_SEQ unprompted",),
    ),
    ("automatic-speech-recognition", "speech", "AutoModelForCTC", ("transcription",), SOUND, ("CTC",)),
    ("automatic-speech-recognition", "speech", "", (), SOUND, ("RNNT", "TDT")),
    # Language models that transcribe if a prompt tells them to. Transcription tasks have no prompts.
    (
        "automatic-speech-recognition",
        "speech",
        "AutoModelForMultimodalLM",
        TEXT,
        SOUND,
        ("SPEECH_SEQ_2_SEQ prompted",),
    ),
    (
        "image-text-to-text",
        "vision-language",
        "AutoModelForImageTextToText",
        PICTURES,
        ("pictures",),
        ("IMAGE_TEXT_TO_TEXT",),
    ),
    ("audio-text-to-text", "speech", "AutoModelForMultimodalLM", TEXT, SOUND, ("MULTIMODAL_LM sound",)),
    ("audio-text-to-text", "speech", "", (), SOUND, ("SEQ_TO_SEQ_CAUSAL_LM sound",)),
    ("any-to-any", "vision-language", "AutoModelForMultimodalLM", PICTURES, ("pictures", "sound"), ("MULTIMODAL_LM",)),
    ("text-generation", "text generator", "AutoModelForCausalLM", TEXT, (), ("CAUSAL_LM",)),
    ("text2text-generation", "sequence-to-sequence", "AutoModelForSeq2SeqLM", TEXT, (), ("SEQ_TO_SEQ_CAUSAL_LM",)),
    ("text-classification", "classifier", "AutoModelForSequenceClassification", (), (), ("SEQUENCE_CLASSIFICATION",)),
    ("token-classification", "classifier", "AutoModelForTokenClassification", (), (), ("TOKEN_CLASSIFICATION",)),
    ("question-answering", "other", "AutoModelForQuestionAnswering", (), (), ("QUESTION_ANSWERING",)),
    ("multiple-choice", "other", "AutoModelForMultipleChoice", (), (), ("MULTIPLE_CHOICE",)),
    ("fill-mask", "other", "AutoModelForMaskedLM", (), (), ("MASKED_LM",)),
    ("image-classification", "classifier", "AutoModelForImageClassification", (), (), ("IMAGE_CLASSIFICATION",)),
    ("video-classification", "classifier", "AutoModelForVideoClassification", (), (), ("VIDEO_CLASSIFICATION",)),
    ("audio-classification", "classifier", "AutoModelForAudioClassification", (), (), ("AUDIO_CLASSIFICATION",)),
    (
        "zero-shot-image-classification",
        "other",
        "AutoModelForZeroShotImageClassification",
        (),
        (),
        ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    ),
    ("object-detection", "other", "AutoModelForObjectDetection", (), (), ("OBJECT_DETECTION",)),
    (
        "zero-shot-object-detection",
        "other",
        "AutoModelForZeroShotObjectDetection",
        (),
        (),
        ("ZERO_SHOT_OBJECT_DETECTION",),
    ),
    (
        "image-segmentation",
        "other",
        "",
        (),
        (),
        ("SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION"),
    ),
    ("mask-generation", "other", "AutoModelForMaskGeneration", (), (), ("MASK_GENERATION",)),
    ("depth-estimation", "other", "AutoModelForDepthEstimation", (), (), ("DEPTH_ESTIMATION",)),
    (
        "visual-question-answering",
        "other",
        "AutoModelForVisualQuestionAnswering",
        (),
        (),
        ("VISUAL_QUESTION_ANSWERING",),
    ),
    ("text-to-speech", "other", "", (), (), ("TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM")),
    ("time-series-forecasting", "other", "", (), (), ("TIME_SERIES_PREDICTION",)),
    ("image-feature-extraction", "other", "AutoModel", (), (), ("IMAGE",)),
    ("feature-extraction", "other", "AutoModel", (), (), ("BASE",)),
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
    """Return the classes in one of transformers' mappings.

    A second word selects some of them. ``sound``: those that hear and do not see. ``unprompted``: those that
    transcribe without a prompt. ``prompted``: language models that need one.
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
