"""Docstrings, comments, help texts and error messages read like those of well-kept projects."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from prose import KINDS, LIMIT, Sentence, rate, read

PROJECT = Path(__file__).resolve().parent.parent


@cache
def sentences(layer: str) -> tuple[Sentence, ...]:
    return tuple(sentence for file in sorted((PROJECT / layer).rglob("*.py")) for sentence in read(file))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ["flows", "tasks", "merge_core"])
def test_texts_are_idiomatic(layer: str, kind: str) -> None:
    of_kind = [sentence for sentence in sentences(layer) if sentence.kind == kind]
    matches = [
        f"{one.file.relative_to(PROJECT)}:{one.line}: {one.matches}: {one.text}" for one in of_kind if one.matches
    ]
    assert rate(of_kind) <= LIMIT, "\n".join(matches)


@pytest.mark.parametrize(
    "text",
    [
        "What is asked of whom meanwhile: keys, the store, files.",
        "To be called before anything is done that a look must not do.",
        "Of several tasks that is asked of their mean.",
        "Nights that nobody carried out.",
        "which is no model of this merge",
    ],
)
def test_a_literal_translation_is_found(text: str) -> None:
    assert Sentence("docstring", Path("x.py"), 1, text).matches


@pytest.mark.parametrize(
    "text",
    [
        "Return the digest of all files.",
        "Log cache keys, file reads and subprocesses.",
        "Raise InvalidInput if a tensor contains NaN.",
        "Size of the first random sample per task or group. Default: 500.",
    ],
)
def test_plain_english_is_not(text: str) -> None:
    assert not Sentence("docstring", Path("x.py"), 1, text).matches
