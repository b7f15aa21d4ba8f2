"""Compare two tokenizers part by part, and determine whether they assign different ids to the same text.

All of ``tokenizer.json`` is compared. A difference counts as a change of ids unless the part that differs is known to
be harmless. Equivalent spellings are first converted to a common form: defaults that older files omit, sequences with
one element, empty prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint.vocabulary.definition import MERGES, NAME, SETTINGS, TokenizerDefinition

# Defaults of the tokenizers library for keys that a file omits.
_MODEL_DEFAULTS: Mapping[str, Any] = {
    "byte_fallback": False,
    "continuing_subword_prefix": "",
    "dropout": 0.0,
    "end_of_word_suffix": "",
    "fuse_unk": False,
    "ignore_merges": False,
    "max_input_chars_per_word": 100,
    "unk_token": None,
}
_STEP_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ByteLevel": {"add_prefix_space": True, "use_regex": True},
    "Metaspace": {"prepend_scheme": "always", "split": True, "replacement": "▁"},
    "Split": {"invert": False},
    "BertNormalizer": {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
}
# Keys under which sequences list their steps.
_STEPS = ("pretokenizers", "normalizers", "processors", "decoders")
# ``trim_offsets`` changes offsets, not ids. ``str_rep`` is an older name of another key.
_STEP_IGNORED = frozenset({"trim_offsets", "str_rep"})
# Parts of a pipeline that do not change ids: conversion of ids to text, and truncation and padding of batches.
_HARMLESS = frozenset({"decoder", "padding", "truncation"})
_COMPARED_SEPARATELY = frozenset({"version", "model", "added_tokens"})
# Keys of tokenizer_config.json that determine ids, and keys that assign a role to a token.
_ID_SETTINGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "split_special_tokens")
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class SpellingDifference:
    """One difference between two tokenizers.

    Args:
        key: Key with which a profile can accept the difference, such as ``merges`` or ``model.byte_fallback``.
        file: Name of the file that contains the differing value.
        found: Value in the second tokenizer.
        expected: Value in the first tokenizer.
        changes_ids: Whether the two tokenizers may assign different ids to the same text.
    """

    key: str
    file: str
    found: str
    expected: str
    changes_ids: bool


def compare_tokenizers(first: TokenizerDefinition, second: TokenizerDefinition) -> tuple[SpellingDifference, ...]:
    """Return the differences between two tokenizers, apart from token ids, which ``vocabulary_differences`` compares.

    Formats older than ``tokenizer.json`` contain neither splitting rules nor model options. If only one tokenizer has
    such a format, only merges and settings are compared, and an additional difference says so.
    """
    if first.has_pipeline != second.has_pipeline:
        first_file, second_file = Path(first.location).name, Path(second.location).name
        older_file = second_file if first.has_pipeline else first_file
        found = f"{second_file}: the splitting rules were not compared, because {older_file} does not contain them"
        unknown = SpellingDifference("pre_tokenizer", second_file, found, first_file, changes_ids=False)
        merges = _merges(first, second) if first.merges and second.merges else ()
        return (*merges, *settings_differences(first.settings, second.settings), unknown)
    return (
        *model_differences(first, second),
        *pipeline_differences(first, second),
        *_added_differences(first, second),
        *settings_differences(first.settings, second.settings),
    )


def model_differences(first: TokenizerDefinition, second: TokenizerDefinition) -> Iterator[SpellingDifference]:
    """Yield the differences between the ``model`` sections of two tokenizers, apart from the ids of their tokens.

    The model is the part that splits words into tokens, such as BPE or Unigram. If the kinds of the models are equal,
    the order of their merges, their scores and their options are compared.
    """
    if first.kind != second.kind:
        yield SpellingDifference("model.type", NAME, second.kind or "nothing", first.kind or "nothing", True)
        return
    yield from _merges(first, second)
    if (scores_1 := _scores(first)) != (scores_2 := _scores(second)):
        names = [token for token in scores_1 if token in scores_2 and scores_1[token] != scores_2[token]]
        found = f"{len(names)} scores differ" + (f", such as that of {names[0]!r}" if names else "")
        if names:  # Pieces that only one tokenizer has are differences of the vocabulary.
            yield SpellingDifference("scores", NAME, found, "the same scores", True)
    options_1, options_2 = _model_options(first), _model_options(second)
    for key in sorted(options_1.keys() | options_2.keys()):
        value_1, value_2 = options_1.get(key), options_2.get(key)
        if value_1 != value_2:
            yield SpellingDifference(f"model.{key}", NAME, _format_value(value_2), _format_value(value_1), True)


def _merges(first: TokenizerDefinition, second: TokenizerDefinition) -> Iterator[SpellingDifference]:
    if first.merges != second.merges:
        pairs = zip(first.merges, second.merges, strict=False)
        shorter = min(len(first.merges), len(second.merges))
        index = next((number for number, (merge_1, merge_2) in enumerate(pairs) if merge_1 != merge_2), shorter)
        found, expected = (
            " + ".join(map(repr, tokenizer.merges[index])) if index < len(tokenizer.merges) else "none"
            for tokenizer in (second, first)
        )
        file = NAME if second.has_pipeline else MERGES
        yield SpellingDifference("merges", file, f"merge {index} is {found}", expected, True)


def pipeline_differences(first: TokenizerDefinition, second: TokenizerDefinition) -> Iterator[SpellingDifference]:
    """Yield differences in all other sections: normalizer, pre-tokenizer, post-processor, decoder, unknown sections."""
    for key in sorted((first.content.keys() | second.content.keys()) - _COMPARED_SEPARATELY):
        part_1, part_2 = (_normalize(tokenizer.content.get(key), key) for tokenizer in (first, second))
        if key == "post_processor":
            part_1, part_2 = _replace_ids(part_1, first), _replace_ids(part_2, second)
        if part_1 != part_2:
            found, expected = _format_value(part_2), _format_value(part_1)
            yield SpellingDifference(key, NAME, found, expected, key not in _HARMLESS)


def _added_differences(first: TokenizerDefinition, second: TokenizerDefinition) -> Iterator[SpellingDifference]:
    common = first.ids.keys() & second.ids.keys()
    one_sided = [token for token in common if (token in first.added) != (token in second.added)]
    if one_sided:
        token = min(one_sided)
        yield SpellingDifference(
            "added_tokens",
            NAME,
            f"{len(one_sided)} tokens are added tokens in only one tokenizer, such as {token!r}",
            "the same added tokens",
            True,
        )
    both = [token for token in first.added if token in second.added]
    for flags, changes in ((("single_word", "lstrip", "rstrip", "normalized"), True), (("special",), False)):
        differing = [t for t in both if any(first.added[t][flag] != second.added[t][flag] for flag in flags)]
        if differing:
            key = "added_tokens.flags" if changes else "added_tokens.special"
            found = f"{len(differing)} added tokens have different flags, such as {differing[0]!r}"
            yield SpellingDifference(key, NAME, found, f"the same {', '.join(flags)}", changes)


def settings_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[SpellingDifference]:
    """Yield differences in settings of ``tokenizer_config.json`` that determine ids or the roles of tokens."""
    for key in (*_ID_SETTINGS, *_ROLES):
        tokens = (settings.get(key) for settings in (first, second))
        value_1, value_2 = (token.get("content") if isinstance(token, Mapping) else token for token in tokens)
        if value_1 is None and value_2 is None:
            continue
        if value_1 != value_2:
            # If a file omits the key, the tokenizer class has a default, which may well be the same value.
            changes = key in _ID_SETTINGS and value_1 is not None and value_2 is not None
            yield SpellingDifference(key, SETTINGS, _format_value(value_2), _format_value(value_1), changes)


def _model_options(tokenizer: TokenizerDefinition) -> dict[str, Any]:
    """Return all options of the model except tokens and merges, with defaults filled in."""
    declared = {
        key: value for key, value in tokenizer.model.items() if key not in ("type", "vocab", "merges", "unk_id")
    }
    options = {**_MODEL_DEFAULTS, **{key: value for key, value in declared.items() if value is not None}}
    unk_id = tokenizer.model.get("unk_id")
    if type(unk_id) is int:  # Unigram stores an id. Convert it to its token, which can be compared.
        options["unk_token"] = next((token for token, number in tokenizer.model_ids.items() if number == unk_id), None)
    return options


def _scores(tokenizer: TokenizerDefinition) -> dict[str, Any]:
    vocab = tokenizer.model["vocab"]
    return {item[0]: item[1] for item in vocab} if isinstance(vocab, list) else {}


def _normalize(value: Any, key: str) -> Any:
    """Convert equivalent spellings of a part to one form."""
    if isinstance(value, Mapping):
        steps = next((value[name] for name in _STEPS if name in value), None)
        if value.get("type") == "Sequence" and isinstance(steps, list):
            forms = [form for step in steps if (form := _normalize(step, key)) is not None]
            return forms[0] if len(forms) == 1 else forms or None
        if key == "post_processor" and value.get("type") == "ByteLevel":
            return None  # It only changes offsets.
        declared = {name: _normalize(item, "") for name, item in value.items() if name not in _STEP_IGNORED}
        if declared.get("type") == "Metaspace" and "prepend_scheme" in declared:
            declared.pop("add_prefix_space", None)
        return {**_STEP_DEFAULTS.get(str(declared.get("type")), {}), **declared}
    if isinstance(value, list):
        return [_normalize(item, "") for item in value]
    return value


def _replace_ids(value: Any, tokenizer: TokenizerDefinition) -> Any:
    """Return a post-processor with tokens instead of their ids, because ids depend on the vocabulary."""
    tokens = {number: token for token, number in tokenizer.ids.items()} if value is not None else {}

    def replace_in(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {name: replace_in(item) for name, item in part.items()}
        if isinstance(part, list):
            return [replace_in(item) for item in part]
        return tokens.get(part, part) if type(part) is int else part

    if not isinstance(value, Mapping):
        return [_replace_ids(item, tokenizer) for item in value] if isinstance(value, list) else value
    keys_with_ids = ("special_tokens", "sep", "cls")  # Under other keys, numbers are segment types.
    return {name: replace_in(item) if name in keys_with_ids else item for name, item in value.items()}


def _format_value(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 100 else f"{text[:100]}…"
