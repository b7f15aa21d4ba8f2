"""Find out how a generated answer ended, and separate the thought that a thinking model writes before it.

The rule is that of lm-eval: the answer is the text after the last end token, without leading whitespace, up to the
first stop string. Stop strings end an answer only after the thought, because they also occur in thoughts. An answer
that a token limit cuts off within the thought is not an answer (see ``AnswerEnd.is_unfinished_thought``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from mergegate.merge_core.errors import InvalidInput

Decode = Callable[[list[int]], str]
AnswerReason = Literal["stop", "eos", "length", "context", ""]


class AnswerEnd(NamedTuple):
    """How a generated answer ended.

    An ``LM`` with an attribute ``answer_ends`` reports this for each answer. The attribute is a deque of the ends of
    the answers that the ``LM`` will pass to its cache hook next, in the same order.
    """

    # stop: a stop string; eos: an end-of-text token; length: the token limit of an answer; context: the end of the
    # model's context before that limit; '': unknown. A server may report 'stop' for an end-of-text token.
    reason: AnswerReason = ""
    tokens: int | None = None  # number of generated tokens, including the final one; None: unknown
    thinking: int | None = None  # number of tokens in the thought before the answer; None: unknown

    @property
    def is_unfinished_thought(self) -> bool:
        """Whether the answer was cut off before its thought ended. It then counts as no answer."""
        return bool(self.thinking) and self.reason in CUT_OFF and self.thinking == self.tokens


CUT_OFF = ("length", "context")  # reasons for which an answer is incomplete
DEFAULT_BUDGET = 256  # lm-eval's default for the largest number of tokens in an answer


class ThoughtEnd(NamedTuple):
    """How a model marks the end of a thought."""

    end: str  # text that ends a thought
    token: int | None = None  # the same as a token, if the text of an answer would lack it (a special token)
    is_expected: bool = True  # whether stop strings before the end belong to a thought

    def answer_texts(self, ids: Sequence[int], texts: Callable[[list[int]], Iterable[str]]) -> list[str]:
        """Return the texts of an answer in which stop strings count; none if the thought has not ended.

        ``ids`` are the generated tokens, and ``texts`` decodes tokens into all texts to search.
        """
        if not self.is_expected:
            return list(texts(list(ids)))
        if self.token is not None:
            after = ids[ids.index(self.token) + 1 :] if self.token in ids else None
            return [] if after is None else [text.lstrip() for text in texts(list(after))]
        return [text.partition(self.end)[2].lstrip() for text in texts(list(ids)) if self.end in text]

    def length(self, ids: Sequence[int], decode: Decode, *, is_cut_off: bool) -> int:
        """Return the number of tokens in the thought, including its end.

        A thought that never ends has all tokens if the answer was cut off. An answer that ended by itself has no
        thought.
        """
        if self.token is not None and self.token in ids:
            return len(ids) - list(reversed(ids)).index(self.token)
        if self.token is None and (ends := decode(list(ids)).count(self.end)):
            counts = range(len(ids))
            return bisect_left(counts, ends, key=lambda count: decode(list(ids[:count])).count(self.end))
        return len(ids) if self.is_expected and is_cut_off else 0

    def without_tail(self, text: str, stop: Sequence[str]) -> str:
        """Return ``text`` up to the first stop string after the thought. All of it if there is none."""
        before, end, after = text.partition(self.end) if self.is_expected else ("", "", text)
        if self.is_expected and not end:
            return text
        blanks = after[: len(after) - len(after.lstrip())] if self.is_expected else ""
        answer = after[len(blanks) :]
        found = [at for string in stop if string and (at := answer.find(string)) >= 0]
        return f"{before}{end}{blanks}{answer[: min(found)]}" if found else text


def first_stop(
    ids: Sequence[int],
    stop: Sequence[str],
    texts: Callable[[list[int]], Iterable[str]],
    thought_end: ThoughtEnd | None = None,
) -> int | None:
    """Return the number of tokens up to the first stop string that ends an answer; None if there is none."""

    def has_stopped(count: int) -> bool:
        tokens = list(ids[:count])
        searched = texts(tokens) if thought_end is None else thought_end.answer_texts(tokens, texts)
        return any(string in text for text in searched for string in stop if string)

    return bisect_left(range(len(ids)), True, key=has_stopped) if has_stopped(len(ids)) else None


def answer_end(
    ids: Sequence[int],
    eos: Collection[int],
    stop: Sequence[str],
    texts: Callable[[list[int]], Sequence[str]],
    budget: int,
    thought_end: ThoughtEnd | None = None,
) -> AnswerEnd:
    """Return how one answer of a batch ended.

    ``ids`` are the tokens after the prompt. Tokens after the end of the answer, such as padding, are ignored. ``eos``
    and ``stop`` are the tokens and texts that end an answer, ``texts`` decodes tokens into the texts in which ``stop``
    is searched, the last of which is scored. ``budget`` is the largest number of tokens in an answer.
    """
    last = next((count for count, token in enumerate(ids, 1) if token in eos), None)
    before = list(ids if last is None else ids[: last - 1])
    if (stopped := first_stop(before, stop, texts, thought_end)) is not None:
        end = AnswerEnd("stop", stopped)
    elif last is not None:
        end = AnswerEnd("eos", last)
    else:
        # A batch that ends before its budget has no unfinished answer: transformers has other criteria, like max_time.
        end = AnswerEnd("length" if len(ids) >= budget else "stop", len(ids))
    if thought_end is None:
        return end
    answer, is_cut_off = before[: end.tokens], end.reason in CUT_OFF
    return end._replace(thinking=thought_end.length(answer, lambda tokens: texts(tokens)[-1], is_cut_off=is_cut_off))


def require_visible(thought_end: ThoughtEnd | None, tokenizer: Any, model: str) -> None:
    """Check that a server's answers contain the end of a thought."""
    if thought_end is not None and thought_end.end in tokenizer.all_special_tokens:
        raise InvalidInput(
            f"evaluate.think_end_token: {thought_end.end}",
            found=f"a special token of {model}, which servers remove from answers",
            expected="a token that is in the text of an answer",
            remedy="use backend: hf or vllm",
        )


def find_thought_end(
    think_end_token: str | int | None, enable_thinking: bool | None, tokenizer: Any, *, location: str = "evaluate"
) -> ThoughtEnd | None:
    """Return how a model with ``tokenizer`` ends its thoughts, or None if ``think_end_token`` is None.

    Raises:
        InvalidInput: If the tokenizer does not have the token.
    """
    if think_end_token is None:
        return None
    is_expected = enable_thinking is not False
    if isinstance(think_end_token, int):
        if think_end_token >= len(tokenizer):
            raise InvalidInput(
                f"{location}.think_end_token",
                found=f"{think_end_token}, but the tokenizer {tokenizer.name_or_path} has {len(tokenizer):,} tokens",
                expected="the id of a token, or its text such as '</think>'",
            )
        return ThoughtEnd(tokenizer.decode([think_end_token]), think_end_token, is_expected)
    # Decoding an answer drops special tokens.
    is_special = think_end_token in tokenizer.all_special_tokens
    token = tokenizer.convert_tokens_to_ids(think_end_token) if is_special else None
    return ThoughtEnd(think_end_token, token, is_expected)
