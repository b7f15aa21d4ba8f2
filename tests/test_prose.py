"""Docstrings and comments read like those of well-kept projects, in the packages that have been rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from prose import LIMIT, Sentence, rate, read

PROJECT = Path(__file__).resolve().parent.parent

# Packages whose docstrings and comments have been rewritten. The others follow; messages and help texts follow last.
REWRITTEN: tuple[str, ...] = ()


@pytest.mark.parametrize("package", REWRITTEN)
def test_docstrings_and_comments_are_idiomatic(package: str) -> None:
    path = PROJECT / package
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    sentences = [sentence for file in files for sentence in read(file)]
    for kind in ("docstring", "comment"):
        of_kind = [sentence for sentence in sentences if sentence.kind == kind]
        # A small package may have one match: the limit is for 1,000 sentences.
        matches = [sentence for sentence in of_kind if sentence.matches]
        assert rate(of_kind) <= LIMIT or len(matches) <= 1, [
            f"{one.file.relative_to(PROJECT)}:{one.line}: {one.matches}: {one.text}" for one in matches
        ]


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
