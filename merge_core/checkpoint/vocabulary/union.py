"""Join several tokenizers into one, the base's with tokens of the others, and compute rows for new tokens.

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

Tokens of two tokenizers are compared by the bytes that they represent: ``Ġthe`` of a byte-level tokenizer and ``▁the``
of SentencePiece are two spellings of the same token.

A new token comes from a donor model, and tokens that both models have connect their embedding spaces. The donor's row
for the new token is approximated by a combination of the donor's rows for a few shared tokens. The same combination of
*the model's* rows for these tokens is the new row (arXiv:2506.06607). Orthogonal matching pursuit determines the
combination: each step selects the row that is best aligned with the residual, fits all selected rows by least squares,
and updates the residual.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from mergegate.merge_core.checkpoint.vocabulary.comparison import model_differences, pipeline_differences
from mergegate.merge_core.checkpoint.vocabulary.definition import NAME, SETTINGS, TokenizerDefinition, assign_ids
from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    import torch


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


TransplantMethod = Literal["omp", "mean"]
METHODS: tuple[str, ...] = get_args(TransplantMethod)
# A residual below this fraction of the target is rounding error.
_ROUNDING = 1e-6


def token_bytes(tokenizer: TokenizerDefinition) -> dict[bytes, int]:
    """Return the id of every token by the bytes that it represents.

    The key of an added token is its text after a zero byte, which distinguishes it from ordinary tokens. If several
    tokens represent the same bytes, the first one counts.
    """
    types = {*_types(tokenizer.content.get("decoder")), *_types(tokenizer.content.get("pre_tokenizer"))}
    byte_level = "ByteLevel" in types
    # GPT-2's table: printable Latin-1 characters are their own bytes, U+0100 and up are the other bytes.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + index): byte for index, byte in enumerate(unprintable)}
    metaspace = not byte_level and any("▁" in token for token in tokenizer.model_ids)
    ids: dict[bytes, int] = {}
    for token, number in tokenizer.ids.items():
        if token in tokenizer.added:
            ids.setdefault(b"\0" + token.encode(), number)
        elif byte_level and all(character in table for character in token):
            ids.setdefault(bytes(table[character] for character in token), number)
        elif metaspace and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            ids.setdefault(bytes([int(token[3:5], 16)]), number)
        elif metaspace:
            ids.setdefault(token.replace("▁", " ").encode(), number)
        else:
            ids.setdefault(token.encode(), number)
    return ids


def _types(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        yield str(part.get("type"))
        for inner in part.values():
            yield from _types(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _types(inner)


def sparse_combinations(targets: torch.Tensor, atoms: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Approximate many targets by sparse combinations of atoms, with orthogonal matching pursuit.

    Args:
        targets: Rows to approximate, [n, d] in float32 or float64.
        atoms: Rows to combine, [s, d] in the same format. Zero rows are never selected.
        k: Maximum number of atoms per target, at least 1.

    Returns:
        Indices of the selected atoms [n, k], and coefficients [n, k]. An atom that is not needed has the coefficient 0.
    """
    import torch

    count, width = targets.shape
    k = max(1, min(k, len(atoms), width))
    lengths = atoms.norm(dim=1)
    directions = atoms / lengths.clamp_min(torch.finfo(atoms.dtype).tiny)[:, None]
    usable = (lengths > 0).to(atoms.dtype)
    indices = torch.zeros(count, k, dtype=torch.long, device=targets.device)
    basis = targets.new_zeros(count, k, width)
    upper = torch.eye(k, dtype=targets.dtype, device=targets.device).repeat(count, 1, 1)
    along = targets.new_zeros(count, k)
    available = usable.repeat(count, 1)
    residual, size = targets.clone(), targets.norm(dim=1)
    rows = torch.arange(count, device=targets.device)
    for step in range(k):
        match = (residual @ directions.T).abs() * available
        index = match.argmax(dim=1)
        indices[:, step] = index
        available[rows, index] = 0
        atom = directions[index]
        # One pass loses orthogonality if atoms are nearly parallel. Two passes are enough (Kahan, Parlett).
        inside = targets.new_zeros(count, step)
        for _ in range(2):
            part = torch.einsum("nkd,nd->nk", basis[:, :step], atom)
            atom = atom - torch.einsum("nk,nkd->nd", part, basis[:, :step])
            inside = inside + part
        length = atom.norm(dim=1)
        needed = (length > _ROUNDING) & (residual.norm(dim=1) > _ROUNDING * size) & (match.amax(dim=1) > 0)
        direction = torch.where(needed[:, None], atom / length.clamp_min(_ROUNDING)[:, None], torch.zeros_like(atom))
        basis[:, step] = direction
        upper[:, :step, step] = torch.where(needed[:, None], inside, torch.zeros_like(inside))
        upper[:, step, step] = torch.where(needed, length, torch.ones_like(length))
        along[:, step] = (residual * direction).sum(1)
        residual = residual - along[:, step, None] * direction
    weights = torch.linalg.solve_triangular(upper, along[:, :, None], upper=True)[:, :, 0]
    return indices, weights / lengths[indices].clamp_min(torch.finfo(atoms.dtype).tiny)


def combined_rows(indices: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return [n, h] combinations of ``rows`` [s, h], with the result of :func:`sparse_combinations`."""
    import torch

    return torch.einsum("nk,nkh->nh", weights.to(rows.dtype), rows[indices])
