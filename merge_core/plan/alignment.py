"""Rows of embeddings and heads by token, when a recipe says whose vocabulary the result has (``tokenizer_source``).

Output row ``r`` stands for the token that the chosen tokenizer gives the id ``r``. Each model gives its own row of that
token, wherever that is. A model that lacks the token borrows: from the only model that has it, else from the base if
that has it, else the mean over those that have it. Rows without a token (padding) keep their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merge_core.architecture import is_embedding, is_head
from merge_core.checkpoint import Checkpoint, Vocabulary, read_vocabulary
from merge_core.errors import InvalidInput
from merge_core.recipe import Recipe


@dataclass(frozen=True)
class RowMap:
    """Where a model's rows for the output come from.

    Args:
        rows: The model's own row for each output row; -1 where it has none.
        borrowed: For those, rows of other models (by reference) whose mean is taken.
    """

    rows: tuple[int, ...]
    borrowed: Mapping[int, tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class Alignment:
    """How the models' vocabularies become one.

    Args:
        tokenizer: The checkpoint that gives the tokenizer.
        maps: Row maps by reference; empty when every model has the result's rows already.
        size: Number of output rows.
    """

    tokenizer: Checkpoint
    maps: Mapping[str, RowMap]
    size: int


def align(recipe: Recipe, checkpoints: Mapping[str, Checkpoint], donor: str) -> Alignment | None:
    """Row maps for a recipe with ``tokenizer_source``; None when it has none.

    Raises:
        InvalidInput: A model without readable tokenizer, tokens that no merged model has, or ``union`` of
            vocabularies that differ.
    """
    if recipe.tokenizer is None:
        return None
    where = recipe.tokenizer.where
    merged = [str(s.model) for module in recipe.modules for cut in module.slices for s in cut.sources]
    names = list(dict.fromkeys([*merged, donor]))
    wanted = donor if recipe.tokenizer.source in ("base", "union") else str(recipe.tokenizer.source)
    vocabularies = {name: _vocabulary(name, checkpoints[name], where) for name in dict.fromkeys([*names, wanted])}
    sizes = {name: _rows(checkpoints[name]) for name in vocabularies}
    target = vocabularies[wanted]
    if all(vocabularies[name].ids == target.ids and sizes[name] == sizes[wanted] for name in names):
        return Alignment(checkpoints[wanted], {}, sizes[wanted])
    if recipe.tokenizer.source == "union":
        raise InvalidInput(
            where,
            found="union of vocabularies that differ",
            expected="base, or the model whose tokenizer the result should have",
            remedy="name the model with the largest vocabulary: it keeps the others' common tokens",
        )
    token_at = {number: token for token, number in target.ids.items() if number < sizes[wanted]}
    homeless = [token for token in token_at.values() if not _owners(token, vocabularies, sizes, merged)]
    if homeless:
        raise InvalidInput(
            where,
            found=f"{len(homeless)} tokens of {wanted} that no merged model has, such as {homeless[0]!r}",
            expected="a tokenizer whose tokens the models know",
            remedy="choose the tokenizer of one of the merged models",
        )
    base = str(recipe.base) if recipe.base else None
    maps = {
        name: _row_map(name, token_at, vocabularies, sizes, wanted, list(dict.fromkeys(merged)), base)
        for name in dict.fromkeys(merged)
    }
    return Alignment(checkpoints[wanted], maps, sizes[wanted])


def has_vocabulary_rows(name: str) -> bool:
    """Whether a tensor has one row per token."""
    return is_embedding(name) or is_head(name) or name.endswith("lm_head.bias")


def _row_map(
    name: str,
    token_at: Mapping[int, str],
    vocabularies: Mapping[str, Vocabulary],
    sizes: Mapping[str, int],
    wanted: str,
    merged: list[str],
    base: str | None,
) -> RowMap:
    rows: list[int] = []
    borrowed: dict[int, tuple[tuple[str, int], ...]] = {}
    used = set(vocabularies[name].ids.values())
    for row in range(sizes[wanted]):
        token = token_at.get(row)
        if token is None:
            own = row if row < sizes[name] and row not in used else -1
            rows.append(own)
            if own < 0:
                spare = wanted if wanted in merged else name
                borrowed[row] = ((spare, min(row, sizes[spare] - 1)),)
            continue
        number = vocabularies[name].ids.get(token, -1)
        if 0 <= number < sizes[name]:
            rows.append(number)
            continue
        rows.append(-1)
        owners = _owners(token, vocabularies, sizes, merged)
        if base in owners:
            owners = [str(base)]
        borrowed[row] = tuple((owner, vocabularies[owner].ids[token]) for owner in owners)
    return RowMap(tuple(rows), borrowed)


def _owners(
    token: str, vocabularies: Mapping[str, Vocabulary], sizes: Mapping[str, int], merged: list[str]
) -> list[str]:
    return [name for name in dict.fromkeys(merged) if -1 < vocabularies[name].ids.get(token, -1) < sizes[name]]


def _vocabulary(name: str, checkpoint: Checkpoint, where: str) -> Vocabulary:
    vocabulary = read_vocabulary(checkpoint.directory)
    if vocabulary is None or vocabulary.digest:
        raise InvalidInput(
            where,
            found=f"{name} has no tokenizer.json",
            expected="a readable tokenizer in every model, to match tokens",
            remedy="save its tokenizer as tokenizer.json (a fast tokenizer)",
        )
    return vocabulary


def _rows(checkpoint: Checkpoint) -> int:
    sizes = [tensor.shape[0] for tensor in checkpoint.tensors.values() if has_vocabulary_rows(tensor.name)]
    if not sizes:
        raise InvalidInput(str(checkpoint.directory), found="no embeddings", expected="a model with a vocabulary")
    return sizes[0]
