"""Join several tokenizers into one: the tokenizer of the base, extended by tokens of the other tokenizers.

*Siblings* have the same model (the same ordinary tokens, merges, scores and options) and split text in the same way.
They differ only in added tokens and ids, so their union splits a text without new tokens like each of them.
*Strangers* have different models. No single tokenizer can split text like both, so a recipe declares how to treat the
tokens that the base lacks:

========  ============================================================================================================
refuse    refuse the union. This is the default
specials  add only the added tokens
dormant   give ordinary tokens an id but no merges, so that they can be decoded but no text is split into them (BPE)
appended  give ordinary tokens an id, and merges after those of the base. Some texts are then split into them (BPE),
          in a way that the base was not trained on. Words of WordLevel and WordPiece are simply added
========  ============================================================================================================

The ids of the base do not change. New tokens follow, in the order of the models and of their ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mergegate.merge_core.checkpoint.vocabulary.comparison import model_differences, pipeline_differences
from mergegate.merge_core.checkpoint.vocabulary.definition import NAME, SETTINGS, TokenizerDefinition, assign_ids
from mergegate.merge_core.errors import InvalidInput

Strangers = Literal["refuse", "specials", "dormant", "appended"]
STRANGERS: tuple[str, ...] = get_args(Strangers)
_SPLITTING_PARTS = ("normalizer", "pre_tokenizer")
_TRANSPLANT = "give one model the other's tokenizer with mergegate transplant-tokenizer"
# Files for other libraries that duplicate the model part of tokenizer.json.
_OTHER_FORMS = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class JoinedTokenizer:
    """Union of several tokenizers.

    Args:
        content: Content of the new ``tokenizer.json``.
        ids: Ids of all tokens.
        new_added: Flags of the added tokens that are not added tokens of the base, by token.
        model_changed: Whether the model has tokens or merges that the base's model lacks.
        remarks: Remarks for the user, such as the number of omitted tokens.
    """

    content: Mapping[str, Any]
    ids: Mapping[str, int]
    new_added: Mapping[str, Mapping[str, bool]]
    model_changed: bool
    remarks: tuple[str, ...]


def stranger_reason(base: TokenizerDefinition, other_tokenizer: TokenizerDefinition) -> str:
    """Return the first difference that makes two tokenizers strangers, or an empty string for siblings."""
    for difference in model_differences(base, other_tokenizer):
        return f"{difference.key}: {difference.found}, not {difference.expected}"
    for difference in pipeline_differences(base, other_tokenizer):
        if difference.key in _SPLITTING_PARTS:
            return f"{difference.key}: {difference.found}, not {difference.expected}"
    only_base, only_other = _ordinary(base, other_tokenizer), _ordinary(other_tokenizer, base)
    if only_base or only_other:
        example = repr((only_other or only_base)[0])
        return (
            f"{len(only_other)} ordinary tokens that the base lacks, {len(only_base)} that only the base has, such as"
            f" {example}"
        )
    return ""


def join_tokenizers(
    base: TokenizerDefinition,
    tokenizers: Mapping[str, TokenizerDefinition],
    strangers: Strangers,
    location: str,
    extra: Mapping[str, Mapping[str, bool]] | None = None,
) -> JoinedTokenizer:
    """Extend the tokenizer of the base by tokens of other tokenizers.

    Args:
        base: Tokenizer of the base, whose ids do not change.
        tokenizers: Tokenizers of the other models, by model, in the order of the recipe.
        strangers: Treatment of ordinary tokens that the base lacks (see the module docstring).
        location: Location in the recipe, for messages.
        extra: Flags of further tokens to add, by token.

    Raises:
        InvalidInput: The tokenizers cannot be joined in the selected way, or two tokens would have the same id.
    """
    content = {**base.content, "model": dict(base.model)}
    ordinary: dict[str, None] = {}
    merges: list[tuple[str, str]] = []
    remarks: list[str] = []
    for name, other in tokenizers.items():
        if not (reason := stranger_reason(base, other)):
            continue
        _require_joinable(base, other, name, reason, strangers, location)
        if strangers == "specials":
            continue
        new_tokens = sorted(_ordinary(other, base), key=lambda token: other.model_ids[token])
        if strangers == "dormant":
            active = [token for token in new_tokens if _is_atom(token, base)]
            new_tokens = [token for token in new_tokens if not _is_atom(token, base)]
            if active:
                remarks.append(f"{len(active)} single characters of {name} are omitted: they would not be dormant")
        else:
            merges += other.merges
        ordinary.update(dict.fromkeys(new_tokens))
    # The first definition of an added token counts.
    added: dict[str, Mapping[str, bool]] = {}
    for other in tokenizers.values():
        for token in sorted(other.added, key=other.ids.__getitem__):
            if token not in base.added:
                added.setdefault(token, other.added[token])
    added |= {token: flags for token, flags in (extra or {}).items() if token not in base.ids and token not in added}
    changed = bool(ordinary or merges)
    entries = [{"id": base.ids[token], "content": token, **flags} for token, flags in base.added.items()]
    if changed:
        _extend_model(content["model"], base, list(ordinary), merges)
    model_ids = content["model"]["vocab"] if changed else base.model_ids
    ids = assign_ids(model_ids, [*base.added, *added])
    for token, flags in added.items():
        entries.append({"id": ids[token], "content": token, **flags})
    content["added_tokens"] = sorted(entries, key=lambda entry: int(entry["id"]))
    _require_distinct(ids, location)
    return JoinedTokenizer(content, ids, added, changed, tuple(remarks))


def rewritten_files(
    joined_tokenizer: JoinedTokenizer, base: TokenizerDefinition, companions: Sequence[str]
) -> dict[str, bytes | None]:
    """Return the new content of the base's tokenizer files that change, by name, or None for a file to remove.

    ``companions`` are the names of the base's files.
    """
    files: dict[str, bytes | None] = {NAME: _json(joined_tokenizer.content)}
    if joined_tokenizer.model_changed:  # The other formats describe the old model.
        files |= dict.fromkeys(name for name in companions if name in _OTHER_FORMS or name.endswith(".tiktoken"))
    decoder = base.settings.get("added_tokens_decoder")
    if SETTINGS in companions and isinstance(decoder, Mapping):
        entries = {
            str(joined_tokenizer.ids[token]): {"content": token, **flags}
            for token, flags in joined_tokenizer.new_added.items()
        }
        files[SETTINGS] = _json({**base.settings, "added_tokens_decoder": {**decoder, **entries}})
    if "added_tokens.json" in companions:
        files["added_tokens.json"] = _json(
            {token: joined_tokenizer.ids[token] for token in (*base.added, *joined_tokenizer.new_added)}
        )
    return files


def _require_joinable(
    base: TokenizerDefinition,
    other_tokenizer: TokenizerDefinition,
    name: str,
    reason: str,
    strangers: Strangers,
    location: str,
) -> None:
    """Raise InvalidInput if two strangers cannot be joined in the selected way."""
    found = f"the tokenizer of {name} differs from that of the base ({reason})"
    if strangers == "refuse":
        ways = "specials" if base.kind == "Unigram" else "specials, dormant or appended"
        raise InvalidInput(
            location,
            found=f"a union of strangers: {found}",
            expected="tokenizers that differ only in added tokens",
            remedy=f"set tokenizer: {{source: union, strangers: …}} to {ways}, or {_TRANSPLANT}",
        )
    if strangers == "specials":
        return
    if base.kind != other_tokenizer.kind or base.kind == "Unigram" or (strangers == "dormant" and base.kind != "BPE"):
        raise InvalidInput(
            f"{location}: strangers",
            found=f"{strangers}, and {found}",
            expected="two BPE models" if strangers == "dormant" else "models of one kind without token scores",
            remedy=f"set strangers: specials, or {_TRANSPLANT}",
        )
    if strangers == "dormant" and base.model.get("ignore_merges"):
        raise InvalidInput(
            f"{location}: strangers",
            found="dormant, but the base's tokenizer has ignore_merges and uses complete words without any merge",
            expected="a tokenizer that needs a merge for every token",
            remedy=f"set strangers: specials or appended, or {_TRANSPLANT}",
        )
    for difference in pipeline_differences(base, other_tokenizer):
        if difference.key == "decoder":
            raise InvalidInput(
                f"{location}: strangers",
                found=f"{name} spells its tokens differently: decoder {difference.found}",
                expected=f"{difference.expected}, as in the base",
                remedy=f"set strangers: specials, or {_TRANSPLANT}",
            )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if (base.model.get(key) or "") != (other_tokenizer.model.get(key) or ""):
            raise InvalidInput(
                f"{location}: strangers",
                found=f"{name} marks its tokens differently: {key}",
                expected="the same value in both tokenizers",
                remedy=f"set strangers: specials, or {_TRANSPLANT}",
            )


def _ordinary(tokenizer: TokenizerDefinition, other_tokenizer: TokenizerDefinition) -> list[str]:
    """Return the ordinary tokens of ``tokenizer`` that ``other_tokenizer`` lacks."""
    return [
        token
        for token in tokenizer.model_ids
        if token not in other_tokenizer.ids and token not in tokenizer.added and token not in other_tokenizer.added
    ]


def _is_atom(token: str, base: TokenizerDefinition) -> bool:
    """Return whether BPE produces the token without a merge: it is one character (without marks) or one byte."""
    bare = token.removeprefix(base.model.get("continuing_subword_prefix") or "")
    bare = bare.removesuffix(base.model.get("end_of_word_suffix") or "")
    is_byte = bool(base.model.get("byte_fallback")) and len(token) == 6 and token.startswith("<0x")
    return len(bare) <= 1 or len(token) <= 1 or is_byte


def _extend_model(
    model: dict[str, Any], base: TokenizerDefinition, tokens: Sequence[str], merges: Sequence[tuple[str, str]]
) -> None:
    """Add ``tokens`` and ``merges`` to ``model``, the model section of a ``tokenizer.json``.

    The base's added tokens become part of the vocabulary too, because their ids would otherwise change: an added token
    outside the vocabulary gets an id after the last ordinary token.
    """
    vocab = dict(base.ids)
    size = 1 + max(vocab.values(), default=-1)
    for token in tokens:
        vocab[token], size = size, size + 1
    model["vocab"] = vocab
    if base.kind == "BPE":
        base_merges, prefix = set(base.merges), base.model.get("continuing_subword_prefix") or ""
        new_merges = [
            (left, right)
            for left, right in dict.fromkeys(merges)
            if (left, right) not in base_merges and {left, right, left + right.removeprefix(prefix)} <= vocab.keys()
        ]
        model["merges"] = [list(pair) for pair in (*base.merges, *new_merges)]


def _require_distinct(ids: Mapping[str, int], location: str) -> None:
    if len(set(ids.values())) == len(ids):
        return
    by_id: dict[int, str] = {}
    for token, number in ids.items():
        if number in by_id:
            raise InvalidInput(
                location,
                found=f"id {number} for both {by_id[number]!r} and {token!r}, because the base's vocabulary has gaps",
                expected="consecutive ids, after which tokens can be added",
                remedy="fill the gaps with tokens and save the base's tokenizer again",
            )
        by_id[number] = token


def _json(content: Mapping[str, Any]) -> bytes:
    # No indentation, because it would select json's slow encoder, which takes seconds for a large vocabulary.
    return (json.dumps(content, ensure_ascii=False) + "\n").encode()
