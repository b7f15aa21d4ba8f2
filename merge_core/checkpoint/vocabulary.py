"""The token → id mapping of a checkpoint, read from its tokenizer files without any tokenizer library.

Merging embeddings row by row is right only when row 17 means the same token in every model. Nothing in the weights
says so, and nothing fails when it does not: the result just talks nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merge_core.errors import InvalidInput
from merge_core.parsing import JsonBounds, open_plain, read_json

# Those of Gemma, the largest today, have 33 MB and two million values.
TOKENIZER_BOUNDS = JsonBounds(size=96 << 20, values=4_000_000)


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
    if (directory / "tokenizer.json").exists():
        return Vocabulary(_from_tokenizer_json(directory / "tokenizer.json"))
    if (directory / "vocab.json").exists():
        files = [directory / name for name in ("vocab.json", "added_tokens.json") if (directory / name).exists()]
        parts = [_checked(read_json(file, bounds=TOKENIZER_BOUNDS), str(file)) for file in files]
        return Vocabulary({token: number for part in parts for token, number in part.items()})
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


def _from_tokenizer_json(path: Path) -> dict[str, int]:
    content = read_json(path, bounds=TOKENIZER_BOUNDS)
    model = content.get("model")
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        ids = dict(vocab)
    elif isinstance(vocab, list):  # Unigram: [token, score] in the order of the ids.
        listed = [item[0] if isinstance(item, list) and item else None for item in vocab]
        if not all(isinstance(token, str) for token in listed):
            raise InvalidInput(f"{path}: model.vocab", found="entries that are no tokens", expected="[token, score]")
        ids = {token: number for number, token in enumerate(listed)}
    else:
        raise InvalidInput(f"{path}: model.vocab", found=f"{vocab!r:.40}", expected="a vocabulary")
    added = content.get("added_tokens") or []
    if not isinstance(added, list):
        raise InvalidInput(f"{path}: added_tokens", found=f"{added!r:.40}", expected="a list of tokens")
    for token in added:
        if isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int:
            ids[token["content"]] = token["id"]
    return _checked(ids, f"{path}: model.vocab")


def _checked(ids: dict[str, Any], where: str) -> dict[str, int]:
    if not all(type(number) is int and number >= 0 for number in ids.values()):
        raise InvalidInput(where, found="ids that are not whole numbers from 0", expected="token → id")
    return ids
