"""Compare settings in the parents' companion files, such as pooling, prompts and picture sizes.

These are the modules of sentence-transformers (pooling, prompts, similarity), processors (picture sizes, sampling
rates) and generation settings (suppressed tokens, languages). The merge gets the files of one model. If a setting
differs, the merged weights work with a value that another parent was not trained with. Each such setting is a finding.
Files written by different library versions compare equal if they mean the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from mergegate.merge_core.checkpoint import (
    MODULES_FILE,
    PICKLED_SINGLE_NAME,
    SINGLE_NAME,
    Checkpoint,
    Companions,
    companion_kind,
    is_module_file,
)
from mergegate.merge_core.errors import Finding, InvalidInput, to_printable
from mergegate.merge_core.parsing import JsonBounds, parse_json

BOUNDS = JsonBounds(size=96 << 20, values=4_000_000)
# Keys that record which release wrote the file, and from which checkpoint.
INCIDENTAL_KEYS = ("transformers_version", "_from_model_config", "_name_or_path", "name_or_path", "__version__")
_SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"

# Defaults of sentence-transformers. A file without the key means the same.
_MODULE_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "do_lower_case": (False,),
    "include_prompt": (True,),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
    "model_type": ("SentenceTransformer",),
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding", "token_embeddings"),
    "similarity_fn_name": ("cosine",),
    "transformer_task": ("feature-extraction",),
    "use_residual": (False,),
}
# Settings of pooling before release 6 of sentence-transformers, in the order in which it concatenates the vectors.
_OLDER_POOLING: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# These keys change the network's input or the comparison of its outputs. Others, such as the longest text, matter less.
_BLOCKING_MODULE_KEYS = ("default_prompt_name", "model_type", "prompts", "similarity_fn_name")

# Names of the parts of a processor.
_PROCESSOR_PARTS = ("image_processor", "video_processor", "feature_extractor", "audio_processor", "qformer_tokenizer")
# Keys that show that preprocessor_config.json describes a feature extractor for sound.
_SOUND_KEYS = ("feature_extractor_type", "sampling_rate")
# These keys choose a class or the form of the output. The network sees the same numbers.
_FORM_KEYS = (
    "_processor_class", "_valid_processor_keys", "auto_map", "chat_template", "data_format", "device",
    "disable_grouping", "input_data_format", "processor_class", "return_metadata", "return_tensors", "tokenizer_class",
)  # fmt: skip
_CLASS_KEYS = ("image_processor_type", "video_processor_type", "feature_extractor_type")

# Generation settings that a model reads at inference to know which task to do. ``_TABLES`` follow from the vocabulary.
_TABLES = ("is_multilingual", "lang_to_id", "task_to_id")
_FORCED = (
    "alignment_heads", "begin_suppress_tokens", "decoder_start_token_id", "forced_bos_token_id", "forced_decoder_ids",
    "language", "max_initial_timestamp_index", "no_timestamps_token_id", "prev_sot_token_id", "suppress_tokens", "task",
)  # fmt: skip

_LONGEST = 120  # Number of characters of a value that a finding shows.


class FileSetting(NamedTuple):
    """One setting of a companion file. Its value has a form that does not depend on the release that wrote it."""

    file: str
    value: Any


FileSettings: TypeAlias = Mapping[tuple[str, str], FileSetting]
"""Settings by group and key. A group is a file, or a part of a processor that may be in several files."""


class _Difference(NamedTuple):
    """A setting that ``reference``, whose settings the result gets, and a model do not have in common."""

    reference: str
    key: str  # empty for a file that is one setting
    expected: FileSetting | None
    setting: FileSetting | None

    @property
    def file(self) -> str:
        """File of the compared model, or of the reference if only the reference has the setting."""
        setting = self.setting or self.expected
        assert setting is not None
        return setting.file

    @property
    def severity(self) -> Literal["block", "warn"]:
        expected, setting = self.expected, self.setting
        kind = companion_kind(self.file)
        if kind == "module":
            blocks = self.file == MODULES_FILE or "/" in self.file or self.key in _BLOCKING_MODULE_KEYS
        elif kind == "generation settings":
            blocks = self.key in _TABLES and None not in (expected, setting)
        elif expected is None or setting is None or self.key in _CLASS_KEYS:
            blocks = False  # A file without the setting may have the same value by default.
        else:
            blocks = _leaves(expected.value) != _leaves(setting.value)  # The same number may be written in two forms.
        return "block" if blocks else "warn"


def compare_file_settings(
    result: Companions, parents: Mapping[str, Checkpoint], accepted_differences: Collection[str]
) -> Iterator[Finding]:
    """Yield a finding for each setting of a parent that differs from the setting that the result gets.

    Args:
        result: Files that the result gets.
        parents: All models that contribute weights or configuration, by reference. The first is the donor.
        accepted_differences: Keys of settings that may differ.
    """
    donor = next(iter(parents))
    generation = result.sources.get(GENERATION)
    holders = (name for name, parent in parents.items() if parent.companions.sources.get(GENERATION) == generation)
    references = (
        (module_reference(donor, parents) or donor, module_settings),
        (donor, processor_settings),
        (next(holders, donor), generation_settings),
    )
    for name, parent in parents.items():
        differences: list[_Difference] = []
        for reference, read_settings in references:
            expected, settings = read_settings(parents[reference].companions), read_settings(parent.companions)
            for group, key in sorted(expected.keys() | settings.keys()) if expected and settings else ():
                # If one of the models has no settings of the kind, another finding reports the missing file.
                pair = expected.get((group, key)), settings.get((group, key))
                if pair[0] is None or pair[1] is None or pair[0].value != pair[1].value:
                    differences.append(_Difference(reference, key, *pair))
        absent = {each.file for each in differences if each.setting is None and each.file not in parent.companions}
        for file in sorted(absent):
            of_file = [each for each in differences if each.file == file]
            yield Finding(
                "block" if any(each.severity == "block" for each in of_file) else "warn",
                f"{name}: {file}",
                found="no such file",
                expected=f"the settings of {of_file[0].reference}, which the result gets",
                remedy=f"copy the file from {of_file[0].reference} if this model was trained with these settings",
            )
        for each in differences:
            if each.file not in absent:
                yield Finding(
                    "info" if each.key in accepted_differences else each.severity,
                    f"{name}: {each.file}" + (f": {each.key}" if each.key else ""),
                    found=_shown(each.setting),
                    expected=f"{_shown(each.expected)}, as in {each.reference}, whose settings the result gets",
                    remedy="merge models with the same settings. If all models work with those of the result, accept "
                    f"the difference in the profile: checks.tokenizer.accepted: [{each.key}]"
                    if each.key
                    else "merge models with the same modules",
                )


def module_settings(files: Companions) -> FileSettings:
    """Return the settings of the sentence-transformers modules of a model. Empty for a model without modules."""
    settings: dict[tuple[str, str], FileSetting] = {}
    for file in files if MODULES_FILE in files else ():
        if companion_kind(file) != "module" or is_module_weights(file):
            continue
        content = files.read(file)
        value = _parse(content, file)
        if file == MODULES_FILE and isinstance(value, list):
            value = [_module_of(module) for module in value]
        if isinstance(value, dict) and file != MODULES_FILE:
            for key, item in _current_module_keys(value).items():
                if item not in (None, {}, "") and item not in _MODULE_DEFAULTS.get(key, ()):
                    settings[file, key] = FileSetting(file, item)
        else:
            settings[file, ""] = FileSetting(file, content if value is None else value)
    return settings


def processor_settings(files: Companions) -> FileSettings:
    """Return the settings of the processors of a model: a part for each kind of input."""
    settings: dict[tuple[str, str], FileSetting] = {}
    # processor_config.json comes last, because transformers reads the parts in it first.
    for file in sorted(filter(is_processor_file, files), key=lambda file: file == "processor_config.json"):
        value = _parse(files.read(file), file)
        if not isinstance(value, dict):
            continue
        if file == "processor_config.json":
            parts = {part: value.pop(part) for part in _PROCESSOR_PARTS if isinstance(value.get(part), dict)}
            parts["processor"] = value
        elif file == "preprocessor_config.json":
            parts = {"feature_extractor" if any(key in value for key in _SOUND_KEYS) else "image_processor": value}
        else:
            parts = {file.removesuffix("_config.json").replace("preprocessor", "processor"): value}
        for part, content in parts.items():
            for key, item in content.items():
                if item is not None and key not in _FORM_KEYS and key not in INCIDENTAL_KEYS:
                    is_class = key in _CLASS_KEYS and isinstance(item, str)
                    shown = item.removesuffix("Fast").removesuffix("Pil") if is_class else item
                    settings[part, key] = FileSetting(file, shown)
    return settings


def generation_settings(files: Companions) -> FileSettings:
    """Return the generation settings that decide the task of a model, such as suppressed tokens."""
    value = _parse(files.read(GENERATION), GENERATION) if GENERATION in files else None
    content = value if isinstance(value, dict) else {}
    return {
        (GENERATION, key): FileSetting(GENERATION, item)
        for key, item in content.items()
        if key in (*_TABLES, *_FORCED) and item not in (None, [])
    }


def is_processor_file(name: str) -> bool:
    return companion_kind(name) == "processor" and name.endswith(".json")


def _parse(content: bytes, file: str) -> Any:
    if not file.endswith(".json"):
        return None
    try:
        return parse_json(content, file, bounds=BOUNDS)
    except InvalidInput:
        return None


def _module_of(module: Any) -> Any:
    """Return folder and class of a module. sentence-transformers has moved its own classes between packages."""
    if not isinstance(module, dict):
        return module
    class_name = module.get("type")
    if isinstance(class_name, str) and class_name.startswith("sentence_transformers."):
        class_name = class_name.rpartition(".")[2]
    return [module.get("path"), class_name]


def _current_module_keys(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a module under their names in the current release of sentence-transformers."""
    settings = {key: item for key, item in value.items() if key not in INCIDENTAL_KEYS}
    if isinstance(prompts := settings.get("prompts"), dict):
        settings["prompts"] = {name: prompt for name, prompt in prompts.items() if prompt}
    if "word_embedding_dimension" in settings:
        settings.setdefault("embedding_dimension", settings.pop("word_embedding_dimension"))
    flags = {key: settings.pop(key) for key in _OLDER_POOLING if key in settings}
    if flags:
        settings.setdefault("pooling_mode", [mode for key, mode in _OLDER_POOLING.items() if flags.get(key)] or "mean")
    if isinstance(mode := settings.get("pooling_mode"), list) and len(mode) == 1:
        settings["pooling_mode"] = mode[0]
    return settings


def _leaves(value: Any) -> frozenset[str]:
    if isinstance(value, Mapping):
        return frozenset().union(*map(_leaves, value.values()))
    if isinstance(value, list) and not all(isinstance(item, int | float) for item in value):
        return frozenset().union(*map(_leaves, value))
    return frozenset((json.dumps(value),))


def _shown(setting: FileSetting | None) -> str:
    if setting is None:
        return "no value"
    if isinstance(setting.value, bytes):
        return "a file with other content"
    text = to_printable(json.dumps(setting.value, ensure_ascii=False))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


GENERATION = "generation_config.json"


def serialize_config(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def is_module_weights(name: str) -> bool:
    """Return whether sentence-transformers reads the weights of a module from the file called ``name``."""
    return is_module_file(name) and name.partition("/")[2] in (SINGLE_NAME, PICKLED_SINGLE_NAME)


def module_reference(donor: str, models: Mapping[str, Checkpoint]) -> str | None:
    """Return the model whose module files the result gets: the donor if it has any. None if no model has modules."""
    return next((name for name in (donor, *models) if MODULES_FILE in models[name].companions), None)
