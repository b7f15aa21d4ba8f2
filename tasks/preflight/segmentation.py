"""Measure how much of a text two tokenizers segment differently, to add numbers to the finding that they differ.

A tokenizer is untrusted input, so it runs in the confined child process. A failed measurement is reported and does not
change the severity of a finding.
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
_MAX_PAIRS = 16
_TIME_LIMIT = 300.0  # Seconds.

Shares = tuple[float, float]


def add_segmentation_shares(planned_merge: PlannedMerge) -> tuple[Finding, ...]:
    """Return the findings of a plan, adding to each tokenizer difference how much sample text it affects."""
    pairs = planned_merge.tokenizer_pairs[:_MAX_PAIRS]
    if not pairs:
        return planned_merge.findings
    texts = tuple(
        tuple(json.dumps(side, ensure_ascii=False) for side in (pair.original, pair.result)) for pair in pairs
    )
    try:
        answer: object = call_model_process(
            measure_segmentation, (texts,), location="tokenizers", needs=CallNeeds(time_limit=_TIME_LIMIT)
        )
    except MergegateError as error:
        answer = [error.found] * len(pairs)
    # Untrusted code in that process may have sent something else.
    if (
        not isinstance(answer, list)
        or len(answer) != len(pairs)
        or not all(
            isinstance(result, str)
            or (isinstance(result, tuple) and [type(share) for share in result] == [float, float])
            for result in answer
        )
    ):
        answer = ["the tokenizer process returned no result"] * len(pairs)
    updated = {}
    for pair, shares in zip(pairs, answer, strict=True):
        if isinstance(shares, str):
            effect = f"the share of text that it changes is unknown: {shares}"
        else:
            tokens, lines = shares
            effect = (
                f"in a sample text, {tokens:.1%} of the tokens of {pair.model} are segmented differently, in "
                f"{lines:.0%} of the lines"
            )
        updated[pair.finding] = replace(pair.finding, found=f"{pair.finding.found}; {effect}")
    return worst_first(updated.get(finding, finding) for finding in planned_merge.findings)


def measure_segmentation(pairs: Sequence[tuple[str, str]], on_progress: TellProgress) -> list[Shares | str]:
    """Return, for each pair of tokenizers, the shares of tokens and lines that differ, or an error message.

    A pair holds the contents of two ``tokenizer.json`` files.
    """
    results: list[Shares | str] = []
    for number, (left, right) in enumerate(pairs, start=1):
        try:
            results.append(segmentation_shares(left, right, SAMPLE))
        except Exception as error:  # The library raises plain exceptions for unsupported input.
            results.append(f"the library cannot load the tokenizer: {' '.join(str(error).split())[:200]}")
        on_progress(number, len(pairs))
    return results


def segmentation_shares(first_json: str, second_json: str, lines: Sequence[str]) -> Shares:
    """Return the share of the first tokenizer's tokens, and the share of lines, that the second segments differently.

    A token agrees if the other tokenizer has it at the same position.
    """
    from tokenizers import Tokenizer

    first, second = Tokenizer.from_str(first_json), Tokenizer.from_str(second_json)

    def token_positions(tokenizer: Tokenizer, line: str) -> Counter[tuple[int, int, str]]:
        encoded = tokenizer.encode(line)
        # Both characters stand for a space.
        texts = (token.replace("▁", "Ġ") for token in encoded.tokens)
        return Counter((start, end, text) for (start, end), text in zip(encoded.offsets, texts, strict=True))

    total = agreeing = changed = 0
    for line in lines:
        first_tokens, second_tokens = token_positions(first, line), token_positions(second, line)
        total += first_tokens.total()
        agreeing += (first_tokens & second_tokens).total()
        changed += first_tokens != second_tokens
    return 1 - agreeing / max(total, 1), changed / max(len(lines), 1)
