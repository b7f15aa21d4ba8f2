"""What two tokenizers disagree about, part by part, and whether the same text then has other ids.

The rule: *everything* in ``tokenizer.json`` is compared, whatever it is called, and counts as changing ids unless it is
known not to. So a part that nobody has heard of is named, not passed over. Two spellings of one meaning are brought to
one form first: defaults that older files leave out, a sequence of one, a prefix that is empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint.vocabulary.definition import MERGES, NAME, SETTINGS, TokenizerDefinition

# What the library takes where a file does not say.
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
# What sequences call what they consist of.
_STEPS = ("pretokenizers", "normalizers", "processors", "decoders")
# Offsets are no ids; the second is an older name of what another key says.
_STEP_IGNORED = frozenset({"trim_offsets", "str_rep"})
# Parts of a pipeline that change no id: how ids become text again, and how batches are cut and filled up.
_HARMLESS = frozenset({"decoder", "padding", "truncation"})
_COMPARED_APART = frozenset({"version", "model", "added_tokens"})
# Of tokenizer_config.json: what decides ids, and which tokens have a role.
_IDS_OF_SETTINGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "split_special_tokens")
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class SpellingDifference:
    """A part that two tokenizers do not have in common.

    Args:
        key: By which it is accepted: ``merges``, ``pre_tokenizer``, ``model.byte_fallback``, ``eos_token``, ...
        file: That it stands in.
        found: In the other one.
        expected: In the first.
        changes_ids: Whether the same text may have other ids.
    """

    key: str
    file: str
    found: str
    expected: str
    changes_ids: bool


def compare_tokenizers(first: TokenizerDefinition, other: TokenizerDefinition) -> tuple[SpellingDifference, ...]:
    """Return what differs between two tokenizers, besides which token has which id (see ``vocabulary_differences``).

    Files of an older form do not say how text is split, nor which switches the model has. Next to such a file only
    merges and settings are compared, and one difference says that the rest was not.
    """
    if first.has_pipeline != other.has_pipeline:
        mine, theirs = Path(first.where).name, Path(other.where).name
        silent = theirs if first.has_pipeline else mine
        why = f"{theirs}: how text is split was not compared, because {silent} does not say it"
        unknown = SpellingDifference("pre_tokenizer", theirs, why, mine, changes_ids=False)
        merges = _merges(first, other) if first.merges and other.merges else ()
        return (*merges, *settings_differences(first.settings, other.settings), unknown)
    return (
        *model_differences(first, other),
        *pipeline_differences(first, other),
        *_added(first, other),
        *settings_differences(first.settings, other.settings),
    )


def model_differences(first: TokenizerDefinition, other: TokenizerDefinition) -> Iterator[SpellingDifference]:
    """Differences of the models that do not depend on ids: kind, order of merges, scores, switches."""
    if first.kind != other.kind:
        yield SpellingDifference("model.type", NAME, other.kind or "nothing", first.kind or "nothing", True)
        return
    yield from _merges(first, other)
    if (mine := _scores(first)) != (theirs := _scores(other)):
        names = [token for token in mine if token in theirs and mine[token] != theirs[token]]
        shown = f"{len(names)} scores differ" + (f", such as that of {names[0]!r}" if names else "")
        if names:  # Pieces that only one has are a matter of the vocabulary.
            yield SpellingDifference("scores", NAME, shown, "the same scores", True)
    mine, theirs = _switches(first), _switches(other)
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            yield SpellingDifference(f"model.{key}", NAME, _shown(theirs.get(key)), _shown(mine.get(key)), True)


def _merges(first: TokenizerDefinition, other: TokenizerDefinition) -> Iterator[SpellingDifference]:
    if first.merges != other.merges:
        pairs = zip(first.merges, other.merges, strict=False)
        shorter = min(len(first.merges), len(other.merges))
        at = next((number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), shorter)
        found, expected = (_pair(one.merges, at) for one in (other, first))
        file = NAME if other.has_pipeline else MERGES
        yield SpellingDifference("merges", file, f"merge {at} is {found}", expected, True)


def pipeline_differences(first: TokenizerDefinition, other: TokenizerDefinition) -> Iterator[SpellingDifference]:
    """Differences around the models: normaliser, pre-tokenizer, post-processor, decoder, and what else there is."""
    for key in sorted((first.content.keys() | other.content.keys()) - _COMPARED_APART):
        mine, theirs = (_plain_form(one.content.get(key), key) for one in (first, other))
        if key == "post_processor":
            mine, theirs = _by_token(mine, first), _by_token(theirs, other)
        if mine != theirs:
            yield SpellingDifference(key, NAME, _shown(theirs), _shown(mine), key not in _HARMLESS)


def _added(first: TokenizerDefinition, other: TokenizerDefinition) -> Iterator[SpellingDifference]:
    common = first.ids.keys() & other.ids.keys()
    alone = [token for token in common if (token in first.added) != (token in other.added)]
    if alone:
        token = min(alone)
        yield SpellingDifference(
            "added_tokens",
            NAME,
            f"{len(alone)} tokens are added ones in only one of them, such as {token!r}",
            "the same added tokens",
            True,
        )
    both = [token for token in first.added if token in other.added]
    for flags, changes in ((("single_word", "lstrip", "rstrip", "normalized"), True), (("special",), False)):
        differ = [one for one in both if any(first.added[one][flag] != other.added[one][flag] for flag in flags)]
        if differ:
            key = "added_tokens.flags" if changes else "added_tokens.special"
            shown = f"{len(differ)} added tokens with other flags, such as {differ[0]!r}"
            yield SpellingDifference(key, NAME, shown, f"the same {', '.join(flags)}", changes)


def settings_differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[SpellingDifference]:
    """Yield differences between settings of two tokenizers (``tokenizer_config.json``)."""
    for key in (*_IDS_OF_SETTINGS, *_ROLES):
        mine, theirs = (_text_of(one.get(key)) for one in (first, other))
        if mine is None and theirs is None:
            continue
        if mine != theirs:
            # Where one is silent, the class decides, and it may well decide the same.
            changes = key in _IDS_OF_SETTINGS and mine is not None and theirs is not None
            yield SpellingDifference(key, SETTINGS, _shown(theirs), _shown(mine), changes)


def _switches(one: TokenizerDefinition) -> dict[str, Any]:
    """Everything of the model beside its tokens and merges, defaults filled in."""
    said = {key: value for key, value in one.model.items() if key not in ("type", "vocab", "merges", "unk_id")}
    found = {**_MODEL_DEFAULTS, **{key: value for key, value in said.items() if value is not None}}
    number = one.model.get("unk_id")
    if type(number) is int:  # An id in Unigram; as its token, so that it can be compared.
        found["unk_token"] = next((token for token, own in one.model_ids.items() if own == number), None)
    return found


def _scores(one: TokenizerDefinition) -> dict[str, Any]:
    vocab = one.model["vocab"]
    return {item[0]: item[1] for item in vocab} if isinstance(vocab, list) else {}


def _plain_form(value: Any, key: str) -> Any:
    """One form for spellings of one meaning."""
    if isinstance(value, Mapping):
        steps = next((value[name] for name in _STEPS if name in value), None)
        if value.get("type") == "Sequence" and isinstance(steps, list):
            plain = [form for step in steps if (form := _plain_form(step, key)) is not None]
            return plain[0] if len(plain) == 1 else plain or None
        if key == "post_processor" and value.get("type") == "ByteLevel":
            return None  # It moves offsets, and nothing else.
        said = {name: _plain_form(item, "") for name, item in value.items() if name not in _STEP_IGNORED}
        if said.get("type") == "Metaspace" and "prepend_scheme" in said:
            said.pop("add_prefix_space", None)
        return {**_STEP_DEFAULTS.get(str(said.get("type")), {}), **said}
    if isinstance(value, list):
        return [_plain_form(item, "") for item in value]
    return value


def _by_token(value: Any, tokenizer: TokenizerDefinition) -> Any:
    """A post-processor with tokens in the place of their ids, which follow the vocabulary."""
    names = {number: token for token, number in tokenizer.ids.items()} if value is not None else {}

    def plain(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {name: plain(item) for name, item in part.items()}
        if isinstance(part, list):
            return [plain(item) for item in part]
        return names.get(part, part) if type(part) is int else part

    if not isinstance(value, Mapping):
        return [_by_token(item, tokenizer) for item in value] if isinstance(value, list) else value
    numbered = ("special_tokens", "sep", "cls")  # Elsewhere numbers are types of segments.
    return {name: plain(item) if name in numbered else item for name, item in value.items()}


def _pair(merges: tuple[tuple[str, str], ...], at: int) -> str:
    return " + ".join(map(repr, merges[at])) if at < len(merges) else "none"


def _text_of(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 100 else f"{text[:100]}…"
