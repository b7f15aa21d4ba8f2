"""Measure how much of a text two tokenizers segment differently, to add numbers to the finding that they differ.

A tokenizer is untrusted input. Its regular expressions and tables run in the confined child process, like everything
else of a checkpoint that is executed. A failed measurement is reported and does not change the severity of a finding.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mergegate.merge_core import Finding, PlannedMerge
from mergegate.merge_core.errors import MergegateError, worst_first
from mergegate.tasks.checkpoints import CallNeeds, TellProgress, call_model_process
from mergegate.tasks.preflight.sample_text import SAMPLE

# Each pair builds two tokenizers, which takes seconds for the largest.
_MOST_PAIRS = 16
_TIME_LIMIT = 300.0  # Seconds.

Shares = tuple[float, float]


def add_segmentation_shares(planned: PlannedMerge) -> tuple[Finding, ...]:
    """Return the findings of a plan, adding the share of differently segmented sample text to tokenizer differences.

    This costs nothing if no tokenizers differ.
    """
    pairs = planned.tokenizer_pairs[:_MOST_PAIRS]
    if not pairs:
        return planned.findings
    updated = {}
    for pair, shares in zip(
        pairs, _measure([(_text(pair.original), _text(pair.result)) for pair in pairs]), strict=True
    ):
        if isinstance(shares, str):
            share = f"how much of a text that changes is not known: {shares}"
        else:
            tokens, lines = shares
            share = (
                f"{tokens:.1%} of the tokens of {pair.model} in a sample text are cut otherwise, {lines:.0%} of lines"
            )
        updated[pair.finding] = replace(pair.finding, found=f"{pair.finding.found}; {share}")
    return worst_first(updated.get(finding, finding) for finding in planned.findings)


def _text(content: object) -> str:
    return json.dumps(content, ensure_ascii=False)


def _measure(pairs: Sequence[tuple[str, str]]) -> list[Shares | str]:
    try:
        answer: object = call_model_process(
            measure_cuts, (tuple(pairs),), location="tokenizers", needs=CallNeeds(time_limit=_TIME_LIMIT)
        )
    except MergegateError as error:
        return [error.found] * len(pairs)
    # Untrusted code in that process may have sent something else.
    if isinstance(answer, list) and len(answer) == len(pairs) and all(map(_is_measured, answer)):
        return answer
    return ["no answer"] * len(pairs)


def _is_measured(result: object) -> bool:
    if isinstance(result, str):
        return True
    return isinstance(result, tuple) and len(result) == 2 and all(isinstance(share, float) for share in result)


def measure_cuts(pairs: Sequence[tuple[str, str]], on_progress: TellProgress) -> list[Shares | str]:
    """Return for each pair of tokenizers the share of the first one's tokens that the second segments differently.

    The second value of each result is the share of lines with a difference.

    Args:
        pairs: Contents of ``tokenizer.json``.
        on_progress: Callback after each pair.
    """
    results: list[Shares | str] = []
    for number, (left, right) in enumerate(pairs, start=1):
        try:
            results.append(segmentation_shares(left, right, SAMPLE))
        except Exception as error:  # The library raises plain exceptions for unsupported input.
            results.append(f"a tokenizer that the library does not take: {' '.join(str(error).split())[:200]}")
        on_progress(number, len(pairs))
    return results


def segmentation_shares(left: str, right: str, lines: Sequence[str]) -> Shares:
    """Return shares as ``measure_cuts`` does. A token agrees if the other tokenizer has it at the same position."""
    from tokenizers import Tokenizer

    first, second = Tokenizer.from_str(left), Tokenizer.from_str(right)
    total = agreeing = changed = 0
    for line in lines:
        first_tokens, second_tokens = (Counter(_token_positions(tokenizer, line)) for tokenizer in (first, second))
        total += first_tokens.total()
        agreeing += (first_tokens & second_tokens).total()
        changed += first_tokens != second_tokens
    return 1 - agreeing / max(total, 1), changed / max(len(lines), 1)


def _token_positions(tokenizer: object, line: str) -> list[tuple[int, int, str]]:
    encoded = tokenizer.encode(line)  # type: ignore[attr-defined]  # From a library without types.
    # Both characters stand for a space.
    texts = (token.replace("▁", "Ġ") for token in encoded.tokens)
    return [(start, end, text) for (start, end), text in zip(encoded.offsets, texts, strict=True)]
