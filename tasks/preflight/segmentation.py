"""How much of a text two tokenizers cut in different ways: the number beside the finding that they differ.

A tokenizer is a stranger's: its regular expressions and tables are run in the confined child process, like everything
else of a checkpoint that is run. What cannot be measured is said, and changes no finding's severity.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mergegate.merge_core import Finding, PlannedMerge
from mergegate.merge_core.errors import MergegateError, worst_first
from mergegate.tasks.checkpoints import TellProgress, call_model_process
from mergegate.tasks.preflight.sample_text import SAMPLE

# Each is built twice, which takes seconds for the largest.
_MOST_PAIRS = 16
_TIME_LIMIT = 300.0  # seconds

Shares = tuple[float, float]


def add_segmentation_shares(planned: PlannedMerge) -> tuple[Finding, ...]:
    """The findings of a plan; those of tokenizers that differ say the share of a sample text that is cut differently.

    Costs nothing where no tokenizers differ.
    """
    pairs = planned.tokenizer_pairs[:_MOST_PAIRS]
    if not pairs:
        return planned.findings
    said = {}
    for pair, shares in zip(
        pairs, _measured([(_text(pair.original), _text(pair.result)) for pair in pairs]), strict=True
    ):
        if isinstance(shares, str):
            share = f"how much of a text that changes is not known: {shares}"
        else:
            tokens, lines = shares
            share = (
                f"{tokens:.1%} of the tokens of {pair.model} in a sample text are cut otherwise, {lines:.0%} of lines"
            )
        said[pair.finding] = replace(pair.finding, found=f"{pair.finding.found}; {share}")
    return worst_first(said.get(finding, finding) for finding in planned.findings)


def _text(content: object) -> str:
    return json.dumps(content, ensure_ascii=False)


def _measured(pairs: Sequence[tuple[str, str]]) -> list[Shares | str]:
    try:
        answer: object = call_model_process(measure_cuts, (tuple(pairs),), where="tokenizers", time_limit=_TIME_LIMIT)
    except MergegateError as error:
        return [error.found] * len(pairs)
    # Whoever runs there may have sent something else.
    if isinstance(answer, list) and len(answer) == len(pairs) and all(map(_is_measured, answer)):
        return answer
    return ["no answer"] * len(pairs)


def _is_measured(one: object) -> bool:
    if isinstance(one, str):
        return True
    return isinstance(one, tuple) and len(one) == 2 and all(isinstance(share, float) for share in one)


def measure_cuts(pairs: Sequence[tuple[str, str]], on_progress: TellProgress) -> list[Shares | str]:
    """For each pair of tokenizers the share of the first one's tokens that the second does not cut so, and of lines.

    Args:
        pairs: Contents of ``tokenizer.json``.
        on_progress: Told of each pair.
    """
    found: list[Shares | str] = []
    for number, (one, other) in enumerate(pairs, start=1):
        try:
            found.append(segmentation_shares(one, other, SAMPLE))
        except Exception as error:  # the library raises plain ones for what it does not take
            found.append(f"a tokenizer that the library does not take: {' '.join(str(error).split())[:200]}")
        on_progress(number, len(pairs))
    return found


def segmentation_shares(one: str, other: str, lines: Sequence[str]) -> Shares:
    """See :func:`measure_cuts`. A token is cut alike where the other has it at the same place of the text."""
    from tokenizers import Tokenizer

    first, second = Tokenizer.from_str(one), Tokenizer.from_str(other)
    total = alike = changed = 0
    for line in lines:
        mine, theirs = (Counter(_places(tokenizer, line)) for tokenizer in (first, second))
        total += mine.total()
        alike += (mine & theirs).total()
        changed += mine != theirs
    return 1 - alike / max(total, 1), changed / max(len(lines), 1)


def _places(tokenizer: object, line: str) -> list[tuple[int, int, str]]:
    encoded = tokenizer.encode(line)  # type: ignore[attr-defined]  # of a library without types
    # Two ways to write a blank.
    texts = (token.replace("▁", "Ġ") for token in encoded.tokens)
    return [(start, end, text) for (start, end), text in zip(encoded.offsets, texts, strict=True)]
