"""Find out what kind of model a checkpoint is, before anything is loaded or merged.

The kind determines the class that loads the model, the tasks that can judge it, and the model card. It comes from
the files and the class name in ``config.json``: first from the files of sentence-transformers, then from
``model_kinds.json``. ``tests/merge_core/test_model_kinds.py`` generates ``model_kinds.json`` from transformers' own
mappings: it lists the classes of each task. A class may have several tasks (``Gemma3ForConditionalGeneration`` is also
a causal language model). The first entry that contains the class applies, so tasks with more kinds of input come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mergegate.merge_core.architecture.conversions import packaged_table
from mergegate.merge_core.checkpoint import MODULES_FILE, Checkpoint, Companions, list_companions
from mergegate.merge_core.parsing import read_json

_SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"
# Keys in config.json that only sentence-transformers writes, into classifiers that score pairs of texts.
_CROSS_ENCODER_KEYS = ("sentence_transformers", "sbert_ce_default_activation_function")

KindName: TypeAlias = Literal[
    "text generator",
    "vision-language",
    "embedding",
    "cross-encoder",
    "sequence-to-sequence",
    "speech",
    "classifier",
    "other",
]

TaskForm: TypeAlias = Literal["text", "pictures", "retrieval", "transcription"]
"""Form of a task: continuing or rating texts, answering questions about pictures, ranking texts for a query, or
transcribing speech."""


# Modalities that tasks of each form test, see ``ModelKind.modalities``.
_TESTED_MODALITIES: Mapping[TaskForm, tuple[str, ...]] = {"pictures": ("pictures",), "transcription": ("sound",)}


@dataclass(frozen=True)
class ModelKind:
    """Kind of a model."""

    name: KindName  # name in messages, see ``noun``
    pipeline_tag: str | None = None  # task of the model on the Hub, or None if it is not known
    # Class that loads the model: an ``Auto`` class of transformers, or a class of sentence-transformers. Empty if
    # neither library can load it.
    loader: str = ""
    library: str = "transformers"  # ``library_name`` on the Hub: the library of ``loader``
    # Forms of the tasks that can judge the model. Empty if mergegate cannot evaluate it.
    task_forms: tuple[TaskForm, ...] = ()
    # Inputs of the model besides text: ``pictures``, ``sound``. Text tasks do not test them.
    modalities: tuple[str, ...] = ()

    @property
    def noun(self) -> str:
        return _NOUNS[self.name]

    @property
    def loading_library(self) -> str:
        """Library with ``loader``, which may load models of another ``library``, such as classifiers of one label."""
        return "transformers" if self.loader.startswith("Auto") else "sentence-transformers"

    @property
    def reads_text(self) -> bool:
        """Whether text tasks and the perplexity of a text can be measured."""
        return "text" in self.task_forms

    @property
    def is_causal(self) -> bool:
        """Whether the model predicts each token from the tokens before it, so that a text has a perplexity."""
        return self.reads_text and self.name != "sequence-to-sequence"

    def untested_modalities(self, forms: Iterable[TaskForm]) -> tuple[str, ...]:
        """Return the modalities that tasks of these forms do not test."""
        tested = {modality for form in forms for modality in _TESTED_MODALITIES.get(form, ())}
        return tuple(modality for modality in self.modalities if modality not in tested)


TEXT_GENERATOR = ModelKind("text generator", "text-generation", "AutoModelForCausalLM", task_forms=("text",))

_NOUNS: Mapping[KindName, str] = {
    "text generator": "a text generator",
    "vision-language": "a vision-language model",
    "embedding": "an embedding model",
    "cross-encoder": "a cross-encoder",
    "sequence-to-sequence": "a sequence-to-sequence model",
    "speech": "a speech model",
    "classifier": "a classifier",
    "other": "a model of another kind",
}
# Kinds of sentence-transformers, by the ``model_type`` in config_sentence_transformers.json.
_LIBRARY = "sentence-transformers"
_MODULE_KINDS: Mapping[str, ModelKind] = {
    "SentenceTransformer": ModelKind(
        "embedding", "sentence-similarity", "SentenceTransformer", _LIBRARY, ("retrieval",)
    ),
    "SparseEncoder": ModelKind("embedding", "feature-extraction", "SparseEncoder", _LIBRARY, ("retrieval",)),
    "CrossEncoder": ModelKind("cross-encoder", "text-ranking", "CrossEncoder", _LIBRARY, ("retrieval",)),
}


def kind_of(checkpoint: Checkpoint) -> ModelKind:
    """Return the kind of an opened checkpoint.

    Raises:
        InvalidInput: A file that determines the kind is damaged.
    """
    return find_kind(checkpoint.config, checkpoint.companions)


def kind_of_directory(directory: Path) -> ModelKind:
    """Return the kind of the checkpoint in ``directory``, which may lack its weights.

    Raises:
        InvalidInput: A file that determines the kind is missing or damaged.
    """
    return find_kind(read_json(directory / "config.json"), list_companions(directory))


def find_kind(config: Mapping[str, Any], companions: Companions) -> ModelKind:
    """Return the kind of a model with this configuration and these files.

    Raises:
        InvalidInput: A file that determines the kind is damaged.
    """
    if MODULES_FILE in companions:
        settings = companions.json(_SENTENCE_TRANSFORMERS) or {}
        model_type = settings.get("model_type", "SentenceTransformer")
        known = _MODULE_KINDS.get(model_type) if isinstance(model_type, str) else None
        return known or ModelKind("other", library=_LIBRARY)
    kind = _transformers_kind(config)
    if kind.pipeline_tag == "text-classification" and _label_count(config) == 1:  # one score for one or two texts
        if any(key in config for key in _CROSS_ENCODER_KEYS):
            return _MODULE_KINDS["CrossEncoder"]
        return replace(kind, name="cross-encoder", loader="CrossEncoder", task_forms=("retrieval",))
    return kind


def _transformers_kind(config: Mapping[str, Any]) -> ModelKind:
    """Return the kind of the class in a configuration.

    For a class of the checkpoint's own code, ``auto_map`` names the ``Auto`` class that loads it. Without a class,
    transformers loads the default class of the ``model_type``.
    """
    architectures, code = config.get("architectures"), config.get("auto_map")
    class_name = architectures[0] if isinstance(architectures, list) and architectures else None
    entries = _entries()
    if isinstance(class_name, str) and class_name in (classes := class_kinds()):
        return classes[class_name]
    if isinstance(code, Mapping) and (
        loadable := [kind for kind, _, _ in entries if kind.loader and kind.loader in code]
    ):
        return loadable[0]
    if class_name is None:
        model_type = config.get("model_type")
        return next((kind for kind, _, model_types in entries if model_type in model_types), ModelKind("other"))
    return ModelKind("other")


@cache
def class_kinds() -> Mapping[str, ModelKind]:
    kinds: dict[str, ModelKind] = {}
    for kind, classes, _ in _entries():
        for name in classes:
            kinds.setdefault(name, kind)
    return kinds


@cache
def _entries() -> tuple[tuple[ModelKind, tuple[str, ...], tuple[str, ...]], ...]:
    """Return the kinds in ``model_kinds.json`` in order, each with its classes and the ``model_type`` of each."""
    entries = []
    for entry in packaged_table("model_kinds.json"):
        forms, modalities = tuple(entry["task_forms"]), tuple(entry["modalities"])
        kind = ModelKind(entry["kind"], entry["pipeline_tag"], entry["loader"], task_forms=forms, modalities=modalities)
        entries.append((kind, tuple(entry["classes"]), tuple(entry["model_types"])))
    return tuple(entries)


def _label_count(config: Mapping[str, Any]) -> int:
    """Return the number of labels of a classifier. As in transformers, ``id2label`` takes precedence. Default: 2."""
    labels, count = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, Mapping) and labels:
        return len(labels)
    return count if isinstance(count, int) else 2
