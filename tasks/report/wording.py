"""Format the numbers, sizes and sentences of the report. All functions are pure."""

from __future__ import annotations

import re

from mergegate.tasks.gate import DriftVerdict, GateVerdict, GuardVerdict, SuiteVerdict
from mergegate.tasks.report.content import ReportContent, ReportedModel
from mergegate.tasks.stage import Outcome

MINUS, TIMES, NONE = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
NOT_FINITE = "not finite"
GLYPHS: dict[Outcome, str] = {"pass": "✓", "fail": "✗", "inconclusive": "?"}


def number(value: float, decimals: int) -> str:
    """Format ``value`` with fixed decimals and a real minus sign, never as negative zero."""
    text = f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def plain(value: float) -> str:
    """Format a threshold as a user would write it: 3, 2.5. Long decimals, such as those of a mean, are cut to two."""
    text = f"{value:g}"
    if len(text.partition(".")[2]) > 4 and abs(value) >= 0.1 and "e" not in text:
        text = f"{value:.2f}"
    return text.replace("-", MINUS)


def interval(low: float, high: float, decimals: int) -> str:
    return f"[{number(low, decimals)}, {number(high, decimals)}]"


def guard_decimals(guard: GuardVerdict) -> int:
    """Return the fewest decimals (1 to 3) that display every bound on the correct side of its limit.

    A bound of 3.04 is not displayed as 3.0 if the limit is 3. A proven loss is not displayed as zero.
    """
    pairs = [(bound, limit) for bound in (guard.drop, guard.high) for limit in (guard.max_drop, guard.margin)]
    shown_worse = [(guard.low, 0.0)] * (guard.low > 0)
    return _decimals_that_keep_order([*pairs, *shown_worse], fewest=1, most=3)


def drift_decimals(drift: DriftVerdict) -> int:
    """Return the fewest decimals (3 to 5) that display the ratio and its bounds on the correct side of the limits."""
    # Far from the limits, more digits add no information.
    if drift.ratio is not None and drift.ratio >= 10:
        return 1
    bounds = [bound for bound in (drift.ratio, drift.low, drift.high) if bound is not None]
    pairs = [(bound, limit) for bound in bounds for limit in (drift.warn_ratio, drift.max_ratio)]
    return _decimals_that_keep_order(pairs, fewest=3, most=5)


def _decimals_that_keep_order(pairs: list[tuple[float, float]], *, fewest: int, most: int) -> int:
    for decimals in range(fewest, most):
        if all((a > b) == (round(a, decimals) > b) and (a < b) == (round(a, decimals) < b) for a, b in pairs):
            return decimals
    return most


def drop(guard: GuardVerdict) -> str:
    """Return the drop on a guard in points: '4.1 [2.3, 5.9]'. It is negative if the merge is better."""
    decimals = guard_decimals(guard)
    return f"{number(guard.drop, decimals)} {interval(guard.low, guard.high, decimals)}"


def limit(guard: GuardVerdict) -> str:
    """Return the limit for a guard: '3', '3, margin 4' if the two differ, or '11 alone' for a task in a suite."""
    if guard.limit is not None:
        return f"{plain(guard.limit)} alone"
    if guard.margin == guard.max_drop:
        return plain(guard.max_drop)
    return f"{plain(guard.max_drop)}, margin {plain(guard.margin)}"


def format_ratio(drift: DriftVerdict) -> str:
    """Return the perplexity ratio as text: '1.003 [0.998, 1.008]', or that it is not finite."""
    if drift.ratio is None:
        return NOT_FINITE
    if drift.ratio >= 10_000:
        return _scientific(drift.ratio)  # the model is broken; more precision does not matter
    decimals = drift_decimals(drift)
    if drift.low is None or drift.high is None:
        return number(drift.ratio, decimals)
    return f"{number(drift.ratio, decimals)} {interval(drift.low, drift.high, decimals)}"


def format_magnitude(value: float | None) -> str:
    """Format a perplexity or a bits-per-byte value of any magnitude."""
    if value is None:
        return NOT_FINITE
    if value >= 1e6:
        return _scientific(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def title(verdict: GateVerdict) -> str:
    """Return the headline of a verdict: one word."""
    return {"pass": "Passed", "fail": "Refused", "inconclusive": "Undecided"}[verdict.outcome]


def consequence(content: ReportContent) -> str:
    """Return a sentence about publication. Empty if nothing was merged and the verdict is clear."""
    verdict = content.verdict
    if not content.recipe and verdict.outcome != "inconclusive":
        return ""
    if verdict.outcome == "inconclusive":
        word = {"block": "blocks it", "warn": "lets it through with a warning", "pass": "lets it through"}
        if not content.recipe:
            return f"on_inconclusive of the profile {word[verdict.on_inconclusive]}."
        may = "may be published" if verdict.publishable else "will not be published"
        return f"This merge {may}: on_inconclusive of the profile {word[verdict.on_inconclusive]}."
    return "This merge may be published." if verdict.publishable else "This merge will not be published."


_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)


def page_of_model(model: ReportedModel) -> str:
    """Return the address of a Hub model at its commit, or an empty string for any other model."""
    name = model.ref.partition("@")[0].partition("+")[0]
    if not model.revision or not _HUB_NAME.fullmatch(name) or not re.fullmatch(r"[0-9a-f]{40}", model.revision):
        return ""
    return f"https://huggingface.co/{name}/tree/{model.revision}"


def licence(content: ReportContent) -> str:
    """Return the words before the license's name. A merge that is not published only *would* carry a license."""
    if content.verdict.publishable:
        return "The merge may be published under"
    return "By the licences of its parents the merge would carry"


def sentence(content: ReportContent) -> str:
    """Return the reason for the verdict: the most severe reason, or the guard that passed most narrowly."""
    verdict = content.verdict
    if verdict.reasons:
        return verdict.reasons[0]
    sentences = []
    if verdict.suites and verdict.guards:
        sentences = [
            f"The mean of {suite.tasks} tasks loses at most {number(suite.high, 1)} points against {suite.reference}; "
            f"{plain(suite.margin)} are allowed, and no task has fallen far."
            for suite in verdict.suites
        ]
    elif verdict.guards:
        closest = min(verdict.guards, key=lambda guard: guard.margin - guard.high)
        loss = f"loses at most {number(closest.high, guard_decimals(closest))} points against {closest.reference}"
        count = "Both" if len(verdict.guards) == 2 else f"All {len(verdict.guards)}"
        several = f"{count} guards hold. The closest is {closest.task}, which {loss}"
        start = f"{closest.task} {loss}" if len(verdict.guards) == 1 else several
        sentences.append(f"{start}; {plain(closest.margin)} are allowed.")
    elif not verdict.notes:
        sentences.append("No task is guarded.")
    sentences += [f"{note}." for note in verdict.notes]
    drift = verdict.drift
    if drift is not None and drift.ratio is not None:
        value = number(drift.ratio, drift_decimals(drift))
        bound = f"{plain(drift.max_ratio)} is the limit"
        sentences.append(f"Perplexity is {value} times that of the better parent; {bound}.")
    return " ".join(sentences)


def cut_off_answers(content: ReportContent) -> tuple[str, ...]:
    """Return a warning for each task and model of which some answers were cut off."""
    return tuple(
        f"{task}: {ends.describe().replace(' answers', f' answers of {model.name}')}; its score understates the model"
        for model in content.models
        if model.scores is not None
        for task, ends in model.scores.ends.items()
        if ends.cut_off
    )


def documents_saved(verdict: GateVerdict) -> str:
    """Return a sentence about the documents that interim looks and skipped tasks saved. Empty if none."""
    counts_by_task = {
        guard.task: (guard.look.documents, guard.documents_left) for guard in verdict.guards if guard.look
    }
    counts_by_task |= {left_out.task: (0, left_out.documents) for left_out in verdict.not_run}
    evaluated, remaining = (
        (sum(counts) for counts in zip(*counts_by_task.values(), strict=True)) if counts_by_task else (0, 0)
    )
    if not remaining:
        return ""
    share = 100 * remaining / (evaluated + remaining)
    tasks = len({left_out.task for left_out in verdict.not_run})
    method = "looking at a part of them first"
    if tasks:
        method += f" and leaving out {tasks} task{'' if tasks == 1 else 's'} that could change nothing"
    return f"{evaluated:,} of {evaluated + remaining:,} documents were asked; {method} saved {share:.0f} %."


def suite_change(suite: SuiteVerdict) -> str:
    """Return the mean drop in a suite in points, with real minus signs: '0.4 [-0.3, 1.1]'."""
    return f"{number(suite.drop, 1)} {interval(suite.low, suite.high, 1)}"
