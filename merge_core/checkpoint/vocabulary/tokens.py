"""The token → id mapping of a checkpoint, and where two of them disagree.

Merging embeddings row by row is right only when row 17 means the same token in every model. Nothing in the weights
says so, and nothing fails when it does not: the result just talks nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mergegate.merge_core.checkpoint.companions import Companions, is_binary_vocabulary, list_companions
from mergegate.merge_core.checkpoint.vocabulary.definition import added_ids, read_settings, read_tokenizer
from mergegate.merge_core.checkpoint.vocabulary.pieces import read_pieces


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their ids; added tokens (special ones, chat markers) included.

    Args:
        ids: Token → id. Complete if ``is_complete``; else only added tokens.
        digests: sha256 by name of vocabulary files that only their own library reads.
        is_complete: Whether ``ids`` has every token.
        model_tokens: Tokens that are not added ones, if they are known.
    """

    ids: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = True
    model_tokens: frozenset[str] | None = None

    @property
    def added(self) -> dict[str, int]:
        """Ids of the tokens that the model of the tokenizer lacks."""
        return {token: number for token, number in self.ids.items() if token not in (self.model_tokens or ())}


def read_vocabulary(source: Companions | Path) -> Vocabulary | None:
    """Return the vocabulary of a checkpoint; None if it has no tokenizer files.

    Args:
        source: Files of the checkpoint, or its directory.

    Raises:
        InvalidInput: A tokenizer file that is not what its name says, or is not a plain file in its directory.
    """
    files = list_companions(source) if isinstance(source, Path) else source
    contents = {name: files.read(name) for name in files if is_binary_vocabulary(name)}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    if (definition := read_tokenizer(files)) is not None:
        return Vocabulary(definition.ids, digests, model_tokens=frozenset(definition.model_ids))
    if not digests:
        return None
    pieces = next((found for content in contents.values() if (found := read_pieces(content)) is not None), None)
    added = added_ids(files, read_settings(files))
    return Vocabulary(added, digests, is_complete=False, model_tokens=None if pieces is None else frozenset(pieces))


def vocabulary_differences(one: Vocabulary, other: Vocabulary) -> tuple[list[str], list[str], list[str]]:
    """Compare the tokens that both files list: tokens with another id, tokens only in ``one``, only in ``other``.

    A token that only one side has, at an id where the other side has a different token, counts as "another id": that
    row means two things. Of vocabularies that are not complete, added tokens are compared.
    """
    first, second = one.ids, other.ids
    if not (one.is_complete and other.is_complete):
        inside = (one.model_tokens or frozenset()) | (other.model_tokens or frozenset())
        first, second = (
            {token: number for token, number in ids.items() if token not in inside} for ids in (first, second)
        )
    names_one = {number: token for token, number in first.items()}
    names_other = {number: token for token, number in second.items()}
    moved = [token for token, number in first.items() if token in second and second[token] != number]
    moved_ones = set(moved)
    clashing = [
        token
        for number, token in names_one.items()
        if number in names_other and names_other[number] != token and token not in moved_ones and token not in second
    ]
    clashing_ones = set(clashing)
    only_one = [token for token in first if token not in second and token not in clashing_ones]
    only_other = [token for token, number in second.items() if token not in first and number not in names_one]
    return moved + clashing, only_one, only_other
