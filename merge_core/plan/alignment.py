"""Rows of embeddings and heads by token, when a recipe says which vocabulary the result has (``tokenizer``).

Output row ``r`` stands for the token that the result's tokenizer gives the id ``r``. Each model gives its own row of
that token, wherever that is. A model that lacks the token borrows: what the recipe says for the token; else from the
base if that has it, else from the only model that has it, else the mean over those that have it.

Rows without a token (padding) keep their place, so the table never shrinks; where a model has none there, the row of
the model that gives the tokenizer, and where there is none either (the table grew), the mean of the model's own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.architecture import has_vocabulary_rows, parse_layer_place, with_vocabulary
from mergegate.merge_core.checkpoint import AnyTensor, Checkpoint
from mergegate.merge_core.checkpoint.vocabulary import (
    JoinedTokenizer,
    TokenizerDefinition,
    join_tokenizers,
    read_tokenizer,
    rewritten_files,
)
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.plan.rows import MEAN, ZERO, RowMap, map_rows
from mergegate.merge_core.plan.special_ids import GENERATION, follow_tokens, serialize_config
from mergegate.merge_core.recipe import Recipe, RowOrigin, TokenizerChoice

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MARKS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NEW_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@dataclass(frozen=True)
class Alignment:
    """How the models' vocabularies become one.

    Args:
        choice: What the recipe says.
        tokenizer: The checkpoint that gives the tokenizer's files.
        ids: Ids of the result's tokens.
        vocabularies: Tokenizer of each model, by reference.
        sizes: Rows of each model's table.
        wanted: Reference of ``tokenizer``.
        base: Reference of the recipe's base.
        size: Number of output rows.
        content: ``tokenizer.json`` of the result.
        model_changed: Whether the tokenizer's model has tokens or merges that it had not.
        rewritten: Files of the tokenizer that are otherwise than in its directory; None: left out.
        remarks: What a person should know.
    """

    choice: TokenizerChoice
    tokenizer: Checkpoint
    ids: Mapping[str, int]
    vocabularies: Mapping[str, TokenizerDefinition]
    sizes: Mapping[str, int]
    wanted: str
    base: str | None
    size: int
    content: Mapping[str, Any]
    model_changed: bool
    rewritten: Mapping[str, bytes | None]
    remarks: tuple[Finding, ...]
    _made: dict[tuple[str, ...], Mapping[str, RowMap]] = field(default_factory=dict, repr=False, compare=False)

    def maps(self, models: Sequence[str]) -> Mapping[str, RowMap]:
        """Row maps of ``models``, which are merged with each other; empty when each has the result's rows already.

        Raises:
            InvalidInput: A token that none of them has a row for.
        """
        names = tuple(dict.fromkeys(models))
        if names not in self._made:
            self._made[names] = _maps(self, names)
        return self._made[names]


def align(recipe: Recipe, checkpoints: Mapping[str, Checkpoint], donor: str) -> Alignment | None:
    """What becomes of the vocabularies of a recipe with ``tokenizer_source`` or ``tokenizer``; None when it has none.

    Raises:
        InvalidInput: A model without readable tokenizer, a union that is to be refused, a token's source that does not
            exist.
    """
    choice = recipe.tokenizer
    if choice is None:
        return None
    merged = list(
        dict.fromkeys(str(s.model) for module in recipe.modules for cut in module.slices for s in cut.sources)
    )
    names = list(dict.fromkeys([*merged, donor]))
    wanted = donor if choice.source in ("base", "union") else str(choice.source)
    every = list(dict.fromkeys([wanted, *names]))
    vocabularies = {name: _definition(name, checkpoints[name], choice.where) for name in every}
    sizes = {name: _rows(checkpoints[name], name) for name in every}
    target = vocabularies[wanted]
    joined = _joined(choice, vocabularies, wanted, merged)
    tokenizer = checkpoints[wanted]
    ids = target.ids if joined is None else joined.ids
    rewritten = rewritten_files(joined, target, tuple(tokenizer.companions)) if joined is not None else {}
    remarks = [
        Finding("info", choice.where, found=text, expected="", remedy="") for text in (joined.remarks if joined else ())
    ]
    size = _size(choice, ids, vocabularies, sizes, merged, wanted)
    base = str(recipe.base) if recipe.base else None
    for row in choice.tokens:
        _check_origin(row.origin, merged, vocabularies, sizes, row.token, choice.where)
    return Alignment(
        choice=choice,
        tokenizer=tokenizer,
        ids=ids,
        vocabularies=vocabularies,
        sizes=sizes,
        wanted=wanted,
        base=base,
        size=size,
        content=target.content if joined is None else joined.content,
        model_changed=joined is not None and joined.model_changed,
        rewritten=rewritten,
        remarks=tuple(remarks),
    )


def unknown_rows(model: str, tensor: AnyTensor, alignment: Alignment) -> Finding | None:
    """A tensor outside the layers that has a size of the vocabulary and is not known to follow it.

    Its rows may be tokens' in an order that is no longer the result's, and no shape would say so.
    """
    size = alignment.sizes.get(model)
    if size not in tensor.shape or has_vocabulary_rows(tensor.name) or parse_layer_place(tensor.name) is not None:
        return None
    return Finding(
        "block",
        f"{model}: {tensor.name}",
        found=f"shape {list(tensor.shape)}, with as many as the model has rows of tokens",
        expected="embeddings, heads and biases by names that are known, where tokens change their places",
        remedy=f"merge without {alignment.choice.where}, or give the models one vocabulary with transformers first",
    )


def aligned_config(
    config: Mapping[str, Any], alignment: Alignment, donor: str, where: str
) -> tuple[dict[str, Any], list[Finding]]:
    """Configuration of the result, whose ids are those of its tokenizer; and what is wrong with it.

    Marks (begin, end, padding) are those of the model that gives the tokenizer; every other id, and a mark that this
    model does not name, follows its token.

    Args:
        config: Of the donor, otherwise finished.
        alignment: Of the vocabularies.
        donor: Reference of the model that gives the configuration.
        where: What messages call the recipe.
    """
    giver = alignment.tokenizer
    findings: list[Finding] = []
    if donor == alignment.wanted:
        return with_vocabulary(config, alignment.size), findings
    before = {number: token for token, number in alignment.vocabularies[donor].ids.items()}
    moved, lost = follow_tokens(config, before, alignment.ids)
    for key in _MARKS:
        if key in giver.config:
            moved[key] = giver.config[key]
    for key in lost:
        if key in _MARKS and key in giver.config:
            continue
        last = key.rpartition(".")[2]
        findings.append(
            Finding(
                "warn" if last in _MARKS else "block",
                f"{donor}: config.json: {key}",
                found="a token that the result's tokenizer lacks",
                expected="tokens of the result",
                remedy=f"tokenizer: {{source: union}} in {where}, or tokens: with that token",
            )
        )
    return with_vocabulary(moved, alignment.size), findings


def aligned_generation(alignment: Alignment, donor: Checkpoint, donor_name: str) -> dict[str, bytes | None]:
    """``generation_config.json`` of a donor, where the model that gives the tokenizer has none: its ids moved along."""
    if donor_name == alignment.wanted or GENERATION in alignment.tokenizer.companions:
        return {}
    if GENERATION not in donor.companions:
        return {}
    before = {number: token for token, number in alignment.vocabularies[donor_name].ids.items()}
    moved, _ = follow_tokens(donor.companions.json(GENERATION) or {}, before, alignment.ids)
    for key in _MARKS:
        if key in alignment.tokenizer.config:
            moved[key] = alignment.tokenizer.config[key]
    return {GENERATION: serialize_config(moved)}


def _joined(
    choice: TokenizerChoice, vocabularies: Mapping[str, TokenizerDefinition], wanted: str, merged: Sequence[str]
) -> JoinedTokenizer | None:
    """The tokenizer that has to be made, if one has to."""
    target = vocabularies[wanted]
    others = {name: vocabularies[name] for name in merged if name != wanted} if choice.source == "union" else {}
    more = {}
    for row in choice.tokens:
        if row.token not in target.ids:
            kinds = [one.added[row.token] for one in vocabularies.values() if row.token in one.added]
            more[row.token] = kinds[0] if kinds else _NEW_TOKEN
    joined = join_tokenizers(target, others, choice.strangers, choice.where, more)
    if not (joined.new_added or joined.model_changed):
        return None
    if not target.has_pipeline:
        raise InvalidInput(
            choice.where,
            found=f"{wanted} has no tokenizer.json, so a tokenizer with more tokens cannot be written",
            expected="a tokenizer file that also says how text is split",
            remedy="save its tokenizer as tokenizer.json (a fast tokenizer)",
        )
    return joined


def _size(
    choice: TokenizerChoice,
    ids: Mapping[str, int],
    vocabularies: Mapping[str, TokenizerDefinition],
    sizes: Mapping[str, int],
    merged: Sequence[str],
    wanted: str,
) -> int:
    """Rows of the result: never fewer than the tokenizer's model has, and one for each token that somebody has.

    An id past the table of every model that knows it (tokenizers have such) needs none.
    """
    said = {row.token for row in choice.tokens if row.origin is not None}
    size = sizes[wanted]
    beyond = [(token, number) for token, number in ids.items() if number >= size]
    for token, number in beyond:
        owned = any(-1 < vocabularies[name].ids.get(token, -1) < sizes[name] for name in merged)
        if owned or token in said:
            size = max(size, number + 1)
    multiple = choice.pad_to_multiple_of or 1
    return -(-size // multiple) * multiple


def _maps(alignment: Alignment, names: tuple[str, ...]) -> Mapping[str, RowMap]:
    choice, sizes, size = alignment.choice, alignment.sizes, alignment.size
    plain = not any(row.origin for row in choice.tokens)
    known = [alignment.vocabularies[name].ids for name in names]
    if plain and all(ids == alignment.ids for ids in known) and all(sizes[name] == size for name in names):
        return {}
    listed = sorted((number, token) for token, number in alignment.ids.items() if number < size)
    places = np.fromiter((number for number, _ in listed), np.int64, len(listed))
    rows = np.array([[ids.get(token, -1) for _, token in listed] for ids in known], np.int64).reshape(len(names), -1)
    rows[rows >= np.array([sizes[name] for name in names])[:, None]] = -1
    named = {row.token for row in choice.tokens}
    said = {row.token for row in choice.tokens if row.origin is not None}
    within = sizes[alignment.wanted]
    homeless = [
        listed[at][1]
        for at in np.flatnonzero(~(rows >= 0).any(0)).tolist()
        if (listed[at][0] < within or listed[at][1] in named) and listed[at][1] not in said
    ]
    homeless += [token for token in named if token not in said and alignment.ids[token] >= size]
    if homeless:
        raise InvalidInput(
            choice.where,
            found=f"{len(homeless)} tokens of {alignment.wanted} that no merged model has, such as {homeless[0]!r}",
            expected="a tokenizer whose tokens the models know",
            remedy="choose the tokenizer of one of the merged models, or give these tokens a source",
        )
    preferred = names.index(alignment.base) if alignment.base in names else None
    maps = {}
    for own, name in enumerate(names):
        lender, row = np.full(size, MEAN, np.int32), np.zeros(size, np.int64)
        _pad(lender, row, alignment, names, own, places)
        lender[places], row[places], shared = map_rows(own, rows, preferred)
        for token in choice.tokens:
            place = alignment.ids[token.token]
            if token.origin is not None and (token.force or lender[place] != own):
                lender[place], row[place] = _origin_of(token.origin, token.token, names, alignment)
        maps[name] = RowMap(names, own, lender, row, tuple(shared))
    return maps


def _pad(
    lender: NDArray[np.int32],
    row: NDArray[np.int64],
    alignment: Alignment,
    names: tuple[str, ...],
    own: int,
    places: NDArray[np.int64],
) -> None:
    """Rows without a token: the model's own at that place, if it has no token there either; else the tokenizer's."""
    free = np.ones(len(lender), bool)
    free[places] = False
    givers = [own] if alignment.wanted not in names else [names.index(alignment.wanted), own]
    for number in givers:  # The last one wins: the model itself.
        name = names[number]
        usable = np.zeros(len(lender), bool)
        usable[: alignment.sizes[name]] = True
        used = np.fromiter(alignment.vocabularies[name].ids.values(), np.int64)
        usable[used[used < len(lender)]] = False
        spare = np.flatnonzero(free & usable)
        lender[spare], row[spare] = number, spare


def _check_origin(
    origin: RowOrigin | None,
    merged: Sequence[str],
    vocabularies: Mapping[str, TokenizerDefinition],
    sizes: Mapping[str, int],
    token: str,
    where: str,
) -> None:
    if origin is None or origin.model is None:
        return
    name, place = str(origin.model), f"{where}: tokens.{token}"
    if name not in merged:
        raise InvalidInput(
            place, found=f"{name}, which is not merged", expected=f"one of {', '.join(merged)}", remedy="correct it"
        )
    row = _origin_row(origin, token, vocabularies[name])
    if not 0 <= row < sizes[name]:
        found = f"token_id {origin.token_id}" if origin.token_id is not None else f"{origin.token or token!r}"
        raise InvalidInput(
            place, found=f"{found}, for which {name} has no row", expected="a token of that model", remedy="correct it"
        )


def _origin_row(origin: RowOrigin, token: str, vocabulary: TokenizerDefinition) -> int:
    return origin.token_id if origin.token_id is not None else vocabulary.ids.get(origin.token or token, -1)


def _origin_of(origin: RowOrigin, token: str, names: tuple[str, ...], alignment: Alignment) -> tuple[int, int]:
    if origin.model is None:
        return ZERO, 0
    name = str(origin.model)
    if name not in names:
        raise InvalidInput(
            f"{alignment.choice.where}: tokens.{token}",
            found=f"{name}, whose embeddings are not merged in this slice",
            expected=f"one of {', '.join(names)}",
        )
    return names.index(name), _origin_row(origin, token, alignment.vocabularies[name])


def _definition(name: str, checkpoint: Checkpoint, where: str) -> TokenizerDefinition:
    definition = read_tokenizer(checkpoint.companions)
    # Lines of vocab.txt are not the ids of every tokenizer that has such a file.
    if definition is None or definition.where.endswith("vocab.txt"):
        raise InvalidInput(
            where,
            found=f"{name} has no tokenizer.json",
            expected="a readable tokenizer in every model, to match tokens",
            remedy="save its tokenizer as tokenizer.json (a fast tokenizer)",
        )
    return definition


def _rows(checkpoint: Checkpoint, name: str) -> int:
    sizes = {
        tensor.shape[0] for tensor in checkpoint.tensors.values() if has_vocabulary_rows(tensor.name) and tensor.shape
    }
    if len(sizes) != 1:
        raise InvalidInput(
            f"{name}: embeddings",
            found=f"tables of {', '.join(map(str, sorted(sizes)))} rows" if sizes else "no embeddings",
            expected="one number of rows in embeddings and head",
        )
    return sizes.pop()
