"""Compare transcripts: normalize their words, and count insertions, deletions and substitutions."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_APOSTROPHES = "'\u2019\u02bc"  # typewriter, right quotation mark, modifier letter


def normalize_words(text: str) -> str:
    """Return ``text`` in the form in which transcripts are compared, version 1 of the rule.

    Compatibility characters get their usual form (NFKC), letters become lower case (case folding), and a space replaces
    each punctuation mark and symbol. An apostrophe between two letters stays, written as ``'``. Accents and vowel signs
    stay, because they distinguish words. Numbers are not spelled out.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    characters = []
    for at, character in enumerate(text):
        if character in _APOSTROPHES and text[at - 1 : at].isalpha() and text[at + 1 : at + 2].isalpha():
            characters.append("'")
        else:
            characters.append(" " if unicodedata.category(character)[0] in "PS" else character)
    return " ".join("".join(characters).split())


def share_of_errors(reference: Sequence[str], transcript: Sequence[str]) -> float:
    """Return the number of errors in a transcript, divided by the length of the reference, at most 1.

    If the reference is empty, an empty transcript scores 0 and any other scores 1.
    """
    return min(1.0, edit_distance(reference, transcript) / max(1, len(reference)))


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the smallest number of insertions, deletions and substitutions that turn one sequence into the other.

    The table of distances has a row for each item of ``first`` and a column for each item of ``second``. Bit ``i`` of
    ``rises`` and ``falls`` tells whether the distance increases or decreases from row ``i`` to row ``i + 1`` in the
    current column, and bit ``i`` of ``gains`` and ``drops`` whether it does from this column to the next in row
    ``i + 1``. A few operations on integers then compute a column (Hyyrö 2001, Explaining and Extending the
    Bit-parallel Approximate String Matching Algorithm of Myers).
    """
    if not first:
        return len(second)
    positions: dict[str, int] = {}
    for at, item in enumerate(first):
        positions[item] = positions.get(item, 0) | 1 << at
    full, last = (1 << len(first)) - 1, 1 << (len(first) - 1)
    rises, falls, distance = full, 0, len(first)
    for item in second:
        equal = positions.get(item, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        gains, drops = falls | (full & ~(diagonal | rises)), rises & diagonal
        distance += bool(gains & last) - bool(drops & last)
        gains, drops = gains << 1 | 1, drops << 1
        rises, falls = full & (drops | ~(diagonal | gains)), full & gains & diagonal
    return distance
