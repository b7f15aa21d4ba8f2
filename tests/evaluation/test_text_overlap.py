"""A document is found in a text whatever its case, punctuation and spacing; unrelated texts do not match."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.tasks.evaluation.text_overlap import find_occurring, words_of

WORDS = [f"w{number}" for number in range(3000)]
SEPARATORS = [" ", "  ", "\n", ", ", " - ", "... ", " “", "\u00a0", "; "]


def draw(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(count)]


def disguise(words: list[str], rng: random.Random, inserted: int = 0) -> str:
    """Change case, punctuation and spacing, and insert words."""
    words = list(words)
    for _ in range(inserted):
        words.insert(rng.randrange(len(words) + 1), "inserted")
    return "".join(rng.choice([word, word.upper(), word.title()]) + rng.choice(SEPARATORS) for word in words)


@given(st.integers(0, 10**6), st.integers(8, 150))
@settings(max_examples=60, deadline=None)
def test_case_punctuation_and_spacing_do_not_hide_a_document(seed: int, length: int) -> None:
    rng = random.Random(seed)
    words = draw(rng, length)
    cut = rng.randrange(length)
    text = " ".join(draw(rng, 300)) + " " + disguise(words, rng) + " ".join(draw(rng, 300))
    document = (" ".join(words[:cut]), " ".join(words[cut:]))
    assert find_occurring([("other words entirely, and nothing else", "no"), document], ["unrelated", text]) == (1,)


@given(st.integers(0, 10**6), st.integers(80, 200))
@settings(max_examples=60, deadline=None)
def test_a_few_inserted_words_do_not_hide_a_document(seed: int, length: int) -> None:
    rng = random.Random(seed)
    words = draw(rng, length)
    assert find_occurring([(" ".join(words), "")], [disguise(words, rng, inserted=3)]) == (0,)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_common_phrases_do_not_make_a_match(seed: int) -> None:
    """Both texts contain the same two phrases of a dozen words, in documents of forty."""
    rng = random.Random(seed)
    phrases = ["which of the following statements about the passage above is most likely true", "none of the above"]
    document = [*phrases[0].split(), *draw(rng, 30), *phrases[1].split()]
    text = " ".join([*phrases[0].split(), *draw(rng, 500), *phrases[1].split()])
    assert find_occurring([(" ".join(document), "A")], [text]) == ()


def test_the_instructions_of_a_template_do_not_make_a_match() -> None:
    rng = random.Random(0)
    template = " ".join(draw(rng, 40))
    documents = [(f"{template} {' '.join(draw(rng, 9))}", "yes") for _ in range(50)]
    text = f"{template} {' '.join(draw(rng, 200))}"
    assert find_occurring(documents, [text]) == ()
    assert find_occurring(documents, [text + documents[7][0] + " yes"]) == (7,)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("The Capital of FRANCE -- Paris!", True),
        ("the capital of france? Answer: paris", True),
        ("the capital of france", False),  # the answer is missing
        ("paris: the capital of france", False),  # the answer comes first
        ("the capital of france " + "word " * 20 + "paris", False),  # the answer is far away
        ("the capital of Southern France, Paris", False),
    ],
)
def test_a_short_document_needs_all_its_words_in_order(text: str, is_found: bool) -> None:
    assert bool(find_occurring([("the capital of France:", "Paris")], [text])) == is_found


def test_words_are_compared_after_unicode_normalization() -> None:
    assert words_of("\uff26\uff55ll\u3000Width, cafe\u0301 — STRASSE_2") == words_of("full width café straße 2")
    assert words_of("今日は良い天気です") == tuple("今日は良い天気です")
    assert words_of("!?... --") == ()


def test_documents_without_words_are_not_found() -> None:
    assert find_occurring([("", ""), ("!?", "...")], ["!? ...", ""]) == ()


def test_the_time_is_linear_in_the_texts() -> None:
    rng = random.Random(1)
    documents = [(" ".join(draw(rng, 40)), "") for _ in range(300)] + [(" ".join(draw(rng, 5)), "") for _ in range(300)]
    texts = [" ".join(draw(rng, 1000)) for _ in range(160)]

    def sample(count: int) -> float:
        began = time.thread_time()  # Not the wall clock, so other programs cannot fail this test.
        find_occurring(documents, texts[:count])
        return time.thread_time() - began

    def seconds(count: int) -> float:
        return min(sample(count) for _ in range(3))

    sample(10)
    assert seconds(160) < 12 * seconds(40) + 0.2
