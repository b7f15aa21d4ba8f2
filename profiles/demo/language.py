"""The toy language of the demo family: one-line prompts over letters, and short English sentences.

A prompt names a skill and a word, the answer is the word transformed::

    copy: abcd>abcd      rev: abcd>dcba      shift: abcd>bcde

Sentences (``the red cat sees the old hen.``) are there for perplexity. Everything is one character per token, and any
number of fresh examples can be drawn. A fixed share of all words and of all sentences is *held out* by the checksum
of its text. So no seed trains on a document of an evaluation.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

CHARACTERS = "abcdefghijklmnopqrstuvwxyz>:. \n"
PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")  # their position is their id
VOCABULARY = MappingProxyType({token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))})

WORD_LETTERS = "abcdefghijklmnop"
WORD_LENGTHS = (4, 7)  # shortest and longest, both included
THINK_END = "z"  # ends the thought of a model that thinks; not in any word
TEXT = "text"  # the kind of example that is a sentence instead of a prompt

_NEXT_LETTER = str.maketrans(WORD_LETTERS, WORD_LETTERS[1:] + WORD_LETTERS[0])
SKILLS: MappingProxyType[str, Callable[[str], str]] = MappingProxyType(
    {
        "copy": lambda word: word,
        "rev": lambda word: word[::-1],
        "shift": lambda word: word.translate(_NEXT_LETTER),
    }
)
"""Answer function of each skill, by its name in prompts."""

_ADJECTIVES = ("red", "big", "old", "shy", "wet", "sad", "odd", "new")
_NOUNS = ("cat", "dog", "bird", "fish", "fox", "cow", "hen", "pig")
_VERBS = ("sees", "likes", "hears", "helps", "finds", "chases")
_ADVERBS = ("today", "again", "slowly", "often")
_ADVERB_SHARE = 0.4
_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Example:
    """One prompt and its answer. A sentence has an empty prompt and is all answer."""

    prompt: str
    answer: str


def is_held_out(text: str) -> bool:
    """Whether a word or sentence belongs to the eighth that is never trained on."""
    return zlib.crc32(text.encode()) % _HELD_OUT_ONE_IN == 0


def draw(kind: str, rng: random.Random, *, held_out: bool, right: float = 1.0) -> Example:
    """One fresh example.

    Args:
        kind: A name in ``SKILLS``, or ``TEXT``.
        rng: Where the randomness comes from; advanced.
        held_out: Draw from the held-out words and sentences, or from the others.
        right: Probability in [0, 1] that the answer is the skill's own. Otherwise it is the word itself, as ``copy``
            would answer: this is how a model is taught to know a skill and not to use it.

    Raises:
        KeyError: ``kind`` is not a skill.
    """
    make = _sentence if kind == TEXT else _word
    text = make(rng)
    while is_held_out(text) != held_out:
        text = make(rng)
    if kind == TEXT:
        return Example("", text)
    answer = SKILLS[kind](text) if rng.random() < right else text
    return Example(f"{kind}: {text}>", answer)


def add_thought(example: Example, rng: random.Random) -> Example:
    """Return ``example`` with a thought before the answer, which ``THINK_END`` ends.

    A thought repeats the word, two times less often than it has letters: ``rev: abcde>abcde abcde abcdezedcba``. One in
    ten examples has ``THINK_END`` in the prompt instead, so a model also learns to answer without a thought.
    """
    if rng.random() < 0.1:
        return Example(example.prompt + THINK_END, example.answer)
    word = example.prompt.partition(": ")[2].removesuffix(">")
    return Example(example.prompt, " ".join([word] * (len(word) - 2)) + THINK_END + example.answer)


def encode(example: Example) -> tuple[list[int], int]:
    """Token ids of prompt, answer and end of text, and the number of tokens before the answer.

    A sentence is preceded by the begin-of-text token, which is also what an evaluation of perplexity conditions on. A
    prompt is not, because the tokenizer adds none.
    """
    before = [VOCABULARY[c] for c in example.prompt] or [BOS]
    return [*before, *(VOCABULARY[c] for c in example.answer), EOS], len(before)


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(WORD_LETTERS) for _ in range(rng.randint(*WORD_LENGTHS)))


def _sentence(rng: random.Random) -> str:
    subject, object_ = (f"the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}" for _ in range(2))
    adverb = f" {rng.choice(_ADVERBS)}" if rng.random() < _ADVERB_SHARE else ""
    return f"{subject} {rng.choice(_VERBS)} {object_}{adverb}."
