"""The token → id mapping of a checkpoint, and where two of them disagree.

Merging embeddings row by row is right only when row 17 means the same token in every model. Nothing in the weights
says so, and nothing fails when it does not: the result just talks nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from merge_core.checkpoint.vocabulary.definition import read_tokenizer
from merge_core.parsing import open_plain


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their ids; added tokens (special ones, chat markers) included.

    Args:
        ids: Token → id; empty when only ``digest`` is known.
        digest: sha256 of a binary tokenizer file (SentencePiece) when there is no readable mapping.
    """

    ids: Mapping[str, int]
    digest: str = ""


def read_vocabulary(directory: Path) -> Vocabulary | None:
    """Vocabulary of the checkpoint in ``directory``; None when it has no tokenizer files.

    Raises:
        InvalidInput: A tokenizer file that is not what its name says, or is no plain file in ``directory``.
    """
    if (definition := read_tokenizer(directory)) is not None:
        return Vocabulary(definition.ids)
    for name in ("tokenizer.model", "spiece.model", "vocab.txt"):
        if (directory / name).exists():
            with open_plain(directory / name, within=directory) as file:
                return Vocabulary({}, hashlib.file_digest(file, "sha256").hexdigest())  # type: ignore[arg-type]
    return None


def vocabulary_differences(one: Vocabulary, other: Vocabulary) -> tuple[list[str], list[str], list[str]]:
    """Tokens with another id, tokens only in ``one``, tokens only in ``other``.

    A token that only one side has, at an id where the other side has a different token, counts as "another id": that
    row means two things.
    """
    if one.digest or other.digest:
        return (["(binary tokenizer file)"] if one != other else []), [], []
    names_one = {number: token for token, number in one.ids.items()}
    names_other = {number: token for token, number in other.ids.items()}
    moved = [token for token, number in one.ids.items() if token in other.ids and other.ids[token] != number]
    moved_ones = set(moved)
    clashing = [
        token
        for number, token in names_one.items()
        if number in names_other and names_other[number] != token and token not in moved_ones and token not in other.ids
    ]
    clashing_ones = set(clashing)
    only_one = [token for token in one.ids if token not in other.ids and token not in clashing_ones]
    only_other = [token for token, n in other.ids.items() if token not in one.ids and n not in names_one]
    return moved + clashing, only_one, only_other
