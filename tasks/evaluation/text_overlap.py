"""Find texts that occur in other texts, regardless of case, punctuation and spacing. Pure functions.

Texts are compared as sequences of words, after Unicode normalization (NFKC) and case folding, without punctuation.
A document of eight words or more *occurs* in a text if the text contains most of its 8-word sequences (8-grams): the
8-grams that the text shares must cover 70 % of the words. The length and the share are those of PaLM's contamination
analysis (Chowdhery et al. 2022, arXiv 2204.02311, section 8). Counting words instead of 8-grams makes the measure
robust: one inserted word breaks eight 8-grams but leaves most words covered (Touvron et al. 2023, arXiv 2307.09288,
appendix A.6). Shorter documents occur if the text contains all their words in order.

8-grams that many documents share, such as the instructions of a prompt template, do not identify a document and are
ignored. The time is linear in the texts, apart from the matches.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

N = 8  # Words of a sequence that is compared.
SHARE = 0.7  # Share of a document's words that the common sequences must cover.
_MAX_SHARED = 0.1, 5  # Share and number of documents above which a sequence belongs to the template.

# Writing systems without spaces between words: every character counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(f"[{_UNSPACED}]|(?:(?![{_UNSPACED}])[^\\W_])+")


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text for comparison: normalized, case folded, without punctuation."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())))


def find_occurring(documents: Sequence[tuple[str, str]], texts: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the documents that occur in one of ``texts``, ascending.

    A document is a pair of prompt and answer. Either may be empty. In a text, up to eight other words may precede the
    answer of a short document.
    """
    by_ngram: dict[int, list[tuple[int, int]]] = defaultdict(list)  # Document and position of its first word.
    by_words: dict[int, dict[tuple[str, ...], list[tuple[int, tuple[str, ...]]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    lengths: dict[int, int] = {}
    contents = [(words_of(prompt), words_of(answer)) for prompt, answer in documents]
    shared = Counter(ngram for prompt, answer in contents for ngram in set(_ngrams((*prompt, *answer))))
    most = max(_MAX_SHARED[0] * len(documents), _MAX_SHARED[1])
    for document, (prompt, answer) in enumerate(contents):
        words = (*prompt, *answer)
        if len(words) < N:
            first, rest = (prompt, answer) if prompt else (answer, ())
            if first:
                by_words[len(first)][first].append((document, rest))
            continue
        own = [(position, ngram) for position, ngram in enumerate(_ngrams(words)) if shared[ngram] <= most]
        lengths[document] = len({word for position, _ in own for word in range(position, position + N)})
        for position, ngram in own:
            by_ngram[ngram].append((document, position))
    found: set[int] = set()
    for text in texts:
        words = words_of(text)
        matches: dict[int, set[int]] = defaultdict(set)
        for ngram in set(_ngrams(words)) & by_ngram.keys():
            for document, position in by_ngram[ngram]:
                matches[document].add(position)
        for document, positions in matches.items():
            if document not in found:
                covered = np.zeros(max(positions) + N, bool)
                for position in positions:
                    covered[position : position + N] = True
                if covered.sum() >= SHARE * lengths[document]:
                    found.add(document)
        for length, short in by_words.items():
            for start in range(len(words) - length + 1):
                for document, rest in short.get(words[start : start + length], ()):
                    end = start + length
                    gaps = range(end, end + N + 1)
                    if document not in found and any(words[gap : gap + len(rest)] == rest for gap in gaps):
                        found.add(document)
    return tuple(sorted(found))


def _ngrams(words: tuple[str, ...]) -> Iterator[int]:
    """Yield the hash of every sequence of ``N`` words."""
    return (hash(words[start : start + N]) for start in range(len(words) - N + 1))
