"""One tokenizer made of several: the base's, and what the others have beside it.

*Siblings* have the same model (the same ordinary tokens, merges, scores, switches) and cut text in the same way; they
differ in added tokens, and in which id a token has. Their union is exact: every text that holds none of the new tokens
is cut as before, in each of them. *Strangers* differ in the model. There is no tokenizer that cuts as two of them do,
so a recipe says what is to become of the tokens that the base lacks:

========  ============================================================================================================
refuse    nothing: the union is refused. What is not said is not done
specials  only added tokens are taken over
dormant   ordinary tokens get an id and no merges: they can be decoded, and no text is cut into them (BPE)
appended  ordinary tokens get an id, and merges behind the base's: some texts are cut into them (BPE), in another way
          than the base was trained on. Words of WordLevel and WordPiece are simply added
========  ============================================================================================================

Ids of the base stay; new tokens come behind them, in the order of the models and of their ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mergegate.merge_core.checkpoint.vocabulary.comparison import model_differences, pipeline_differences
from mergegate.merge_core.checkpoint.vocabulary.definition import NAME, SETTINGS, TokenizerDefinition, given_ids
from mergegate.merge_core.errors import InvalidInput

Strangers = Literal["refuse", "specials", "dormant", "appended"]
STRANGERS: tuple[str, ...] = get_args(Strangers)
_CUT_BY = ("normalizer", "pre_tokenizer")
_TRANSPLANT = "mergegate transplant-tokenizer gives one model the other's tokenizer"
# Files that say the same as the model part of tokenizer.json, for other readers.
_OTHER_FORMS = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class JoinedTokenizer:
    """A tokenizer that did not exist before.

    Args:
        content: Its ``tokenizer.json``.
        ids: Ids of all its tokens.
        new_added: Added tokens that the base lacked, or had as ordinary ones, with their flags.
        model_changed: Whether the base's model has other tokens or merges now.
        remarks: What a person should know of it.
    """

    content: Mapping[str, Any]
    ids: Mapping[str, int]
    new_added: Mapping[str, Mapping[str, bool]]
    model_changed: bool
    remarks: tuple[str, ...]


def stranger_because(base: TokenizerDefinition, other: TokenizerDefinition) -> str:
    """Why the two are no siblings: the first part that differs; empty where they are."""
    for difference in model_differences(base, other):
        return f"{difference.key}: {difference.found}, not {difference.expected}"
    for difference in pipeline_differences(base, other):
        if difference.key in _CUT_BY:
            return f"{difference.key}: {difference.found}, not {difference.expected}"
    lacking, more = _ordinary(base, other), _ordinary(other, base)
    if lacking or more:
        shown = repr((more or lacking)[0])
        return (
            f"{len(more)} ordinary tokens that the base lacks, {len(lacking)} that only the base has, such as {shown}"
        )
    return ""


def join_tokenizers(
    base: TokenizerDefinition,
    others: Mapping[str, TokenizerDefinition],
    strangers: Strangers,
    where: str,
    more: Mapping[str, Mapping[str, bool]] | None = None,
) -> JoinedTokenizer:
    """The base's tokenizer with what the ``others`` have beside it.

    Args:
        base: Whose ids stay.
        others: By model, in the order of the recipe.
        strangers: What becomes of ordinary tokens that the base lacks.
        where: Place in the recipe, for messages.
        more: Further tokens to add, with their flags.

    Raises:
        InvalidInput: Strangers that are to be refused, or that cannot be joined in the way that is asked for; ids that
            would be given twice.
    """
    content = {**base.content, "model": dict(base.model)}
    ordinary: dict[str, None] = {}
    merges: list[tuple[str, str]] = []
    remarks: list[str] = []
    for name, other in others.items():
        if not (reason := stranger_because(base, other)):
            continue
        _refuse(base, other, name, reason, strangers, where)
        if strangers == "specials":
            continue
        wanted = sorted(_ordinary(other, base), key=lambda token: other.model_ids[token])
        if strangers == "dormant":
            active = [token for token in wanted if _is_atom(token, base)]
            wanted = [token for token in wanted if not _is_atom(token, base)]
            if active:
                remarks.append(f"{len(active)} single characters of {name} are left out: they would be used at once")
        else:
            merges += other.merges
        ordinary.update(dict.fromkeys(wanted))
    added = _new_added(base, others, more or {})
    changed = bool(ordinary or merges)
    entries = [dict(entry) for entry in _listed(base)]
    if changed:
        _extend_model(content["model"], base, list(ordinary), merges, where)
    model_ids = content["model"]["vocab"] if changed else base.model_ids
    ids = given_ids(model_ids, [*base.added, *added])
    for token, flags in added.items():
        entries.append({"id": ids[token], "content": token, **flags})
    content["added_tokens"] = sorted(entries, key=lambda entry: int(entry["id"]))
    _require_distinct(ids, where)
    return JoinedTokenizer(content, ids, added, changed, tuple(remarks))


def rewritten_files(
    joined: JoinedTokenizer, base: TokenizerDefinition, companions: Sequence[str]
) -> dict[str, bytes | None]:
    """Files of the base's tokenizer that are otherwise with the joined one, by name; None: not there.

    Args:
        joined: The new tokenizer.
        base: The one that it began with.
        companions: Names of the files that the base has.
    """
    files: dict[str, bytes | None] = {NAME: _json(joined.content)}
    if joined.model_changed:  # They describe the model as it was.
        files |= dict.fromkeys(name for name in companions if name in _OTHER_FORMS or name.endswith(".tiktoken"))
    decoder = base.settings.get("added_tokens_decoder")
    if SETTINGS in companions and isinstance(decoder, Mapping):
        more = {str(joined.ids[token]): {"content": token, **flags} for token, flags in joined.new_added.items()}
        files[SETTINGS] = _json({**base.settings, "added_tokens_decoder": {**decoder, **more}})
    if "added_tokens.json" in companions:
        files["added_tokens.json"] = _json({token: joined.ids[token] for token in (*base.added, *joined.new_added)})
    return files


def _refuse(
    base: TokenizerDefinition, other: TokenizerDefinition, name: str, reason: str, strangers: Strangers, where: str
) -> None:
    """Raise where these two cannot be joined so."""
    found = f"{name} has another tokenizer than the base: {reason}"
    if strangers == "refuse":
        ways = "specials" if base.kind == "Unigram" else "specials, dormant or appended"
        raise InvalidInput(
            where,
            found=f"a union of strangers: {found}",
            expected="tokenizers that differ in added tokens only",
            remedy=f"tokenizer: {{source: union, strangers: ...}} with {ways}; or {_TRANSPLANT}",
        )
    if strangers == "specials":
        return
    if base.kind != other.kind or base.kind == "Unigram" or (strangers == "dormant" and base.kind != "BPE"):
        raise InvalidInput(
            f"{where}: strangers",
            found=f"{strangers}, and {found}",
            expected="two BPE models" if strangers == "dormant" else "models of one kind, whose tokens have no scores",
            remedy=f"strangers: specials; or {_TRANSPLANT}",
        )
    if strangers == "dormant" and base.model.get("ignore_merges"):
        raise InvalidInput(
            f"{where}: strangers",
            found="dormant, and the base's tokenizer has ignore_merges: whole words are used without any merge",
            expected="a tokenizer that uses no token without a merge",
            remedy=f"strangers: specials or appended; or {_TRANSPLANT}",
        )
    for difference in pipeline_differences(base, other):
        if difference.key == "decoder":
            raise InvalidInput(
                f"{where}: strangers",
                found=f"{name} writes its tokens in another way: decoder {difference.found}",
                expected=f"{difference.expected}, as the base",
                remedy=f"strangers: specials; or {_TRANSPLANT}",
            )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if (base.model.get(key) or "") != (other.model.get(key) or ""):
            raise InvalidInput(
                f"{where}: strangers",
                found=f"{name} marks its tokens in another way: {key}",
                expected="the same marks in both",
                remedy=f"strangers: specials; or {_TRANSPLANT}",
            )


def _ordinary(one: TokenizerDefinition, other: TokenizerDefinition) -> list[str]:
    """Ordinary tokens of one that the other lacks; what is an added token in either is none."""
    return [
        token
        for token in one.model_ids
        if token not in other.ids and token not in one.added and token not in other.added
    ]


def _is_atom(token: str, base: TokenizerDefinition) -> bool:
    """Whether BPE would begin with the token, without any merge: one character (marks aside), or one byte."""
    bare = token.removeprefix(base.model.get("continuing_subword_prefix") or "")
    bare = bare.removesuffix(base.model.get("end_of_word_suffix") or "")
    is_byte = bool(base.model.get("byte_fallback")) and len(token) == 6 and token.startswith("<0x")
    return len(bare) <= 1 or len(token) <= 1 or is_byte


def _new_added(
    base: TokenizerDefinition, others: Mapping[str, TokenizerDefinition], more: Mapping[str, Mapping[str, bool]]
) -> dict[str, Mapping[str, bool]]:
    """Added tokens of the others that the base does not have as such; the first definition of each wins."""
    found: dict[str, Mapping[str, bool]] = {}
    for other in others.values():
        for token in sorted(other.added, key=lambda one: other.ids[one]):
            if token not in base.added:
                found.setdefault(token, other.added[token])
    for token, flags in more.items():
        if token not in base.ids:
            found.setdefault(token, flags)
    return found


def _listed(base: TokenizerDefinition) -> Iterator[Mapping[str, Any]]:
    """The base's added tokens with the ids that they have."""
    for token, flags in base.added.items():
        yield {"id": base.ids[token], "content": token, **flags}


def _extend_model(
    model: dict[str, Any],
    base: TokenizerDefinition,
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    where: str,
) -> None:
    """Write further tokens and merges into a model.

    The base's added tokens come into its vocabulary, too: an added token that is not there has the id after the last
    ordinary one, and would move.
    """
    vocab = dict(base.ids)
    size = 1 + max(vocab.values(), default=-1)
    for token in tokens:
        vocab[token], size = size, size + 1
    model["vocab"] = vocab
    if base.kind == "BPE":
        known = set(base.merges)
        fitting = [
            pair
            for pair in dict.fromkeys(merges)
            if pair not in known and pair[0] in vocab and pair[1] in vocab and _merged(pair, base) in vocab
        ]
        model["merges"] = [list(pair) for pair in (*base.merges, *fitting)]


def _merged(pair: tuple[str, str], base: TokenizerDefinition) -> str:
    return pair[0] + pair[1].removeprefix(base.model.get("continuing_subword_prefix") or "")


def _require_distinct(ids: Mapping[str, int], where: str) -> None:
    if len(set(ids.values())) == len(ids):
        return
    seen: dict[int, str] = {}
    for token, number in ids.items():
        if number in seen:
            raise InvalidInput(
                where,
                found=f"id {number} for both {seen[number]!r} and {token!r}: the base's vocabulary has holes",
                expected="ids without holes, behind which tokens can be added",
                remedy="save the base's tokenizer with tokens in the holes",
            )
        seen[number] = token


def _json(content: Mapping[str, Any]) -> bytes:
    # Without indents: they would take the slow encoder, seconds for a large vocabulary.
    return (json.dumps(content, ensure_ascii=False) + "\n").encode()
