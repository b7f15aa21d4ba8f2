"""Match tokens, token ids and the rows of embeddings and heads when a recipe chooses the tokenizer of the result.

Output row ``r`` belongs to the token with id ``r`` in the result's tokenizer. Each model contributes its own row for
that token, even if the model gives the token another id. A model that lacks the token uses, in this order:

1. the row of the source that the recipe names for the token,
2. the row of the base, if the base has the token,
3. the row of the only model that has the token,
4. the mean of the rows of all models that have the token.

Rows without a token (padding) keep their position, so the table never shrinks. If a model has no such row, it uses the
row of the model that provides the tokenizer. If the table grew and that model has no such row either, each model uses
the mean of its own rows.

A token id in ``config.json``, its parts and ``generation_config.json`` is a row number, so it is replaced by the id
that its token has in the result.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.architecture import has_vocabulary_rows, parse_layer_place
from mergegate.merge_core.checkpoint import AnyTensor, Checkpoint
from mergegate.merge_core.checkpoint.vocabulary import (
    JoinedTokenizer,
    TokenizerDefinition,
    join_tokenizers,
    read_tokenizer,
    rewritten_files,
)
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.plan.jobs import MEAN, SEVERAL, ZERO, RowMap
from mergegate.merge_core.recipe import Recipe, RowOrigin, TokenizerChoice

if TYPE_CHECKING:
    from numpy.typing import NDArray

_IDS = re.compile(r"(^|_)token_(id|ids|index)$|^(begin_)?suppress_tokens$|^bad_words_ids$")
SPECIAL_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PAIRS = "forced_decoder_ids"  # [position, id]


def follow_tokens(
    config: Mapping[str, Any], before: Mapping[str, int], after: Mapping[str, int]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``config`` with the new ids of its tokens, and the keys whose tokens no longer exist.

    ``before`` and ``after`` map tokens to the ids in ``config`` and in the result. If a token no longer exists, its id
    becomes null or is removed from its list, because the old id would mean another token.
    """
    tokens = {number: token for token, number in before.items()}
    lost_keys: list[str] = []

    def move(value: Any, key: str) -> Any:
        if type(value) is int:
            if value < 0:  # Some configurations use negative ids for "none".
                return value
            if (token := tokens.get(value)) is not None and token in after:
                return after[token]
            lost_keys.append(key)
            return None
        if isinstance(value, list):
            inner = [move(item, key) for item in value]
            return [item for item in inner if item is not None and item != []]
        return value

    def move_part(content: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in content.items():
            if _IDS.search(key):
                new = move(value, prefix + key)
                result[key] = None if isinstance(value, list) and value and not new else new
            elif key == _PAIRS and isinstance(value, list):
                pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
                moved = [[position, move(number, prefix + key)] for position, number in pairs]
                result[key] = [pair for pair in moved if pair[1] is not None] or None
            elif isinstance(value, Mapping) and key.endswith("_config"):
                result[key] = move_part(value, f"{prefix}{key}.")
            else:
                result[key] = copy.deepcopy(value)
        return result

    return move_part(config, ""), tuple(dict.fromkeys(lost_keys))


_NEW_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@dataclass(frozen=True)
class Alignment:
    """A shared vocabulary for several models, and the row of each token in each model."""

    choice: TokenizerChoice  # tokenizer settings of the recipe
    tokenizer: Checkpoint  # checkpoint that provides the tokenizer's files
    ids: Mapping[str, int]  # token ids of the result, by token
    vocabularies: Mapping[str, TokenizerDefinition]  # tokenizer of each model, by model reference
    sizes: Mapping[str, int]  # number of rows in each model's token table, by model reference
    tokenizer_name: str  # reference of ``tokenizer``
    base: str | None  # reference of the recipe's base
    size: int  # number of rows in the result's token table
    content: Mapping[str, Any]  # ``tokenizer.json`` of the result
    model_changed: bool  # whether the result's tokenizer model has tokens or merges that the original lacks
    # New content of each tokenizer file that changes, by file name. None means that the file is omitted.
    rewritten: Mapping[str, bytes | None]
    remarks: tuple[Finding, ...]  # findings for the user
    _cache: dict[tuple[str, ...], Mapping[str, RowMap]] = field(default_factory=dict, repr=False, compare=False)

    def maps(self, models: Sequence[str]) -> Mapping[str, RowMap]:
        """Return the row map of each of ``models`` for merging their token tables with each other.

        The mapping is empty if every model already has exactly the rows of the result.
        """
        names = tuple(dict.fromkeys(models))
        if names not in self._cache:
            self._cache[names] = _build_maps(self, names)
        return self._cache[names]

    def translate(self, content: Mapping[str, Any], model: str) -> tuple[dict[str, Any], list[str]]:
        """Return the settings of ``model`` with the result's token ids, and the keys whose tokens the result lacks.

        The model that provides the tokenizer decides the ids of the begin, end and padding tokens if it defines them.
        Every other id in ``content`` is replaced by the id that the same token has in the result.
        """
        moved, unmatched_keys = follow_tokens(content, self.vocabularies[model].ids, self.ids)
        special_ids = {key: self.tokenizer.config[key] for key in SPECIAL_KEYS if key in self.tokenizer.config}
        return {**moved, **special_ids}, [key for key in unmatched_keys if key not in special_ids]


def align(recipe: Recipe, checkpoints: Mapping[str, Checkpoint], donor: str) -> Alignment | None:
    """Return how to match the vocabularies of a recipe that sets ``tokenizer_source`` or ``tokenizer``, else None."""
    choice = recipe.tokenizer
    if choice is None:
        return None
    merged = list(dict.fromkeys(str(source.model) for source in recipe.sources))
    names = list(dict.fromkeys([*merged, donor]))
    tokenizer_name = donor if choice.source in ("base", "union") else str(choice.source)
    needed = list(dict.fromkeys([tokenizer_name, *names]))
    vocabularies, sizes = {}, {}
    for name in needed:
        definition = read_tokenizer(checkpoints[name].companions)
        # Not every tokenizer with a vocab.txt uses its line numbers as ids.
        if definition is None or definition.location.endswith("vocab.txt"):
            raise InvalidInput(
                choice.location,
                found=f"{name} has no tokenizer.json",
                expected="a readable tokenizer in every model, to match tokens",
                remedy="save its tokenizer as tokenizer.json (a fast tokenizer)",
            )
        vocabularies[name] = definition
    for name in needed:
        tables = [tensor for tensor in checkpoints[name].tensors.values() if has_vocabulary_rows(tensor.name)]
        row_counts = {tensor.shape[0] for tensor in tables if tensor.shape}
        if len(row_counts) != 1:
            raise InvalidInput(
                f"{name}: embeddings",
                found=f"tables of {', '.join(map(str, sorted(row_counts)))} rows" if row_counts else "no embeddings",
                expected="the same number of rows in embeddings and head",
            )
        sizes[name] = row_counts.pop()
    target = vocabularies[tokenizer_name]
    joined, ids, size = _result_vocabulary(choice, vocabularies, sizes, tokenizer_name, merged)
    tokenizer = checkpoints[tokenizer_name]
    rewritten = rewritten_files(joined, target, tuple(tokenizer.companions)) if joined is not None else {}
    remarks = [Finding("info", choice.location, text) for text in (joined.remarks if joined else ())]
    for row in choice.tokens:
        if row.origin is not None and row.origin.model is not None:
            name, location = str(row.origin.model), f"{choice.location}: tokens.{row.token}"
            if name not in merged:
                raise InvalidInput(
                    location,
                    found=f"{name} is not a merged model",
                    expected=f"one of {', '.join(merged)}",
                    remedy="name a merged model",
                )
            if not 0 <= _origin_row(row.origin, row.token, vocabularies[name]) < sizes[name]:
                token_id, token = row.origin.token_id, row.origin.token or row.token
                raise InvalidInput(
                    location,
                    found=f"{name} has no row for {f'token_id {token_id}' if token_id is not None else repr(token)}",
                    expected="a token of that model",
                    remedy="name a token of that model",
                )
    return Alignment(
        choice=choice,
        tokenizer=tokenizer,
        ids=ids,
        vocabularies=vocabularies,
        sizes=sizes,
        tokenizer_name=tokenizer_name,
        base=str(recipe.base) if recipe.base else None,
        size=size,
        content=target.content if joined is None else joined.content,
        model_changed=joined is not None and joined.model_changed,
        rewritten=rewritten,
        remarks=tuple(remarks),
    )


def unknown_rows(model: str, tensor: AnyTensor, alignment: Alignment) -> Finding | None:
    """Return a finding if a tensor outside the layers has a dimension of vocabulary size but an unknown name.

    Its rows may belong to tokens whose order changes in the result, and no shape check would notice.
    """
    size = alignment.sizes.get(model)
    if size not in tensor.shape or has_vocabulary_rows(tensor.name) or parse_layer_place(tensor.name) is not None:
        return None
    return Finding(
        "block",
        f"{model}: {tensor.name}",
        found=f"shape {list(tensor.shape)} includes the size of the vocabulary, but mergegate does not know the tensor",
        expected="known names of embeddings, heads and biases, because token ids change",
        remedy=f"remove {alignment.choice.location}, or first give the models one vocabulary with transformers",
    )


def _result_vocabulary(
    choice: TokenizerChoice,
    vocabularies: Mapping[str, TokenizerDefinition],
    sizes: Mapping[str, int],
    tokenizer_name: str,
    merged_models: Sequence[str],
) -> tuple[JoinedTokenizer | None, Mapping[str, int], int]:
    """Return the tokenizer to build (None if an existing one suffices), the result's token ids and its number of rows.

    The result has at least as many rows as the model that provides the tokenizer, and a row for each token that has one
    in some model. Some tokenizers have ids beyond the table of every model that knows them; these need no row.
    """
    target = vocabularies[tokenizer_name]
    united = [name for name in merged_models if name != tokenizer_name] if choice.source == "union" else []
    other_tokenizers = {name: vocabularies[name] for name in united}
    known_tokens = {
        token: kind for definition in reversed([*vocabularies.values()]) for token, kind in definition.added.items()
    }
    new_tokens = (row.token for row in choice.tokens if row.token not in target.ids)
    extra_tokens = {token: known_tokens.get(token, _NEW_TOKEN) for token in new_tokens}
    built = join_tokenizers(target, other_tokenizers, choice.strangers, choice.location, extra_tokens)
    joined = built if built.new_added or built.model_changed else None
    if joined is not None and not target.has_pipeline:
        raise InvalidInput(
            choice.location,
            found=f"{tokenizer_name} has no tokenizer.json, so mergegate cannot add tokens to its tokenizer",
            expected="a tokenizer file that includes the rules for splitting text",
            remedy="save its tokenizer as tokenizer.json (a fast tokenizer)",
        )
    ids = target.ids if joined is None else joined.ids
    rows_with_origin = {row.token for row in choice.tokens if row.origin is not None}
    size = sizes[tokenizer_name]
    for token, number in [(token, number) for token, number in ids.items() if number >= size]:
        has_row = any(-1 < vocabularies[name].ids.get(token, -1) < sizes[name] for name in merged_models)
        if has_row or token in rows_with_origin:
            size = max(size, number + 1)
    multiple = choice.pad_to_multiple_of or 1
    return joined, ids, -(-size // multiple) * multiple


def _build_maps(alignment: Alignment, names: tuple[str, ...]) -> Mapping[str, RowMap]:
    choice, sizes, size = alignment.choice, alignment.sizes, alignment.size
    vocabularies = [alignment.vocabularies[name].ids for name in names]
    is_shared = all(ids == alignment.ids for ids in vocabularies) and all(sizes[name] == size for name in names)
    if is_shared and not any(row.origin for row in choice.tokens):
        return {}
    listed = sorted((number, token) for token, number in alignment.ids.items() if number < size)
    positions = np.fromiter((number for number, _ in listed), np.int64, len(listed))
    rows = np.array([[ids.get(token, -1) for _, token in listed] for ids in vocabularies], np.int64)
    rows = rows.reshape(len(names), -1)
    rows[rows >= np.array([sizes[name] for name in names])[:, None]] = -1
    recipe_tokens = {row.token for row in choice.tokens}
    with_origin = {row.token for row in choice.tokens if row.origin is not None}
    table_size = sizes[alignment.tokenizer_name]
    present = np.asarray((rows >= 0).any(0))
    orphans = [
        token
        for (number, token), has_row in zip(listed, present.tolist(), strict=True)
        if not has_row and (number < table_size or token in recipe_tokens) and token not in with_origin
    ]
    orphans += [token for token in recipe_tokens if token not in with_origin and alignment.ids[token] >= size]
    if orphans:
        raise InvalidInput(
            choice.location,
            found=f"no merged model has {len(orphans)} tokens of {alignment.tokenizer_name}, such as {orphans[0]!r}",
            expected="a tokenizer whose tokens are in the merged models",
            remedy="use the tokenizer of one of the merged models, or set a source for these tokens",
        )
    preferred = names.index(alignment.base) if alignment.base in names else None
    provider = names.index(alignment.tokenizer_name) if alignment.tokenizer_name in names else None
    padding = np.setdiff1d(np.arange(size), positions)  # rows of the result without a token
    spare = [
        np.setdiff1d(padding[padding < sizes[name]], np.fromiter(ids.values(), np.int64))
        for name, ids in zip(names, vocabularies, strict=True)
    ]
    maps = {}
    for own_index, name in enumerate(names):
        lender, row = np.full(size, MEAN, np.int32), np.zeros(size, np.int64)
        # A model uses its own padding, else that of the model that provides the tokenizer.
        for index in (own_index if provider is None else provider, own_index):
            lender[spare[index]], row[spare[index]] = index, spare[index]
        lender[positions], row[positions], shared = map_rows(own_index, rows, preferred)
        for token in choice.tokens:
            position = alignment.ids[token.token]
            if token.origin is not None and (token.force or lender[position] != own_index):
                if token.origin.model is None:
                    lender[position], row[position] = ZERO, 0
                    continue
                model = str(token.origin.model)
                if model not in names:
                    raise InvalidInput(
                        f"{choice.location}: tokens.{token.token}",
                        found=f"the embeddings of {model} are not merged in this slice",
                        expected=f"one of {', '.join(names)}",
                    )
                row[position] = _origin_row(token.origin, token.token, alignment.vocabularies[model])
                lender[position] = names.index(model)
        maps[name] = RowMap(names, own_index, lender, row, tuple(shared))
    return maps


def _origin_row(origin: RowOrigin, token: str, vocabulary: TokenizerDefinition) -> int:
    return origin.token_id if origin.token_id is not None else vocabulary.ids.get(origin.token or token, -1)


def map_rows(
    own_index: int, ids: NDArray[np.int64], base_index: int | None
) -> tuple[NDArray[np.int32], NDArray[np.int64], list[tuple[tuple[int, int], ...]]]:
    """Return the lender, row and shared rows (see :class:`RowMap`) of each token for the model ``own_index``.

    ``ids`` is the row of each token in each model, or -1 for none [models, tokens]. The lender of a token without any
    row is ``MEAN``.
    """
    has = ids >= 0
    count = has.sum(0)
    tokens = ids.shape[1]
    lender = np.full(tokens, MEAN, np.int32)
    row = np.zeros(tokens, np.int64)
    has_single = count == 1
    lender[has_single] = has[:, has_single].argmax(0)
    several = count > 1
    lender[several] = SEVERAL
    for number in (base_index, own_index):
        if number is not None:
            lender[has[number]] = number
    single = np.flatnonzero(lender >= 0)
    row[single] = ids[lender[single], single]
    shared: dict[tuple[tuple[int, int], ...], int] = {}
    for token in np.flatnonzero(lender == SEVERAL).tolist():
        rows = tuple((int(number), int(ids[number, token])) for number in np.flatnonzero(has[:, token]))
        row[token] = shared.setdefault(rows, len(shared))
    return lender, row, list(shared)
