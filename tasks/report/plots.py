"""Plot guards, the perplexity ratio and the judge's win rate against their limits.

Each plot is drawn twice, for a wide page and for a phone, because text must not shrink with the plot. The style sheet
shows the version that fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from mergegate.merge_core.wording import format_count
from mergegate.tasks.gate import GuardVerdict, SuiteVerdict
from mergegate.tasks.report import wording
from mergegate.tasks.report.content import ReportContent
from mergegate.tasks.report.rows import Line, draw_intervals

_SHOWN_STRATA = 10  # strata in the plot of perplexity, worst first
_SHOWN_GUARDS = 4  # guards of each variant in the plot of variants, largest drop first


def guards_plot(content: ReportContent) -> tuple[str, ...]:
    """Return the plots of all guards: drop and interval in points, with the limits ``max_drop`` and ``margin``."""
    verdict = content.verdict
    guards = verdict.all_guards
    if not guards:
        return ()
    lines = [
        *(_suite_line(suite, f"mean of {suite.tasks} tasks", f"against {suite.reference}") for suite in verdict.suites),
        *(_guard_line(guard, guard.task, f"against {guard.reference}") for guard in guards),
    ]
    label = "Drop of each guarded task in points, with its interval. " + " ".join(
        f"{guard.task} against {guard.reference}: {wording.drop(guard)}, {wording.limits(guard)}, {guard.word}."
        for guard in guards
    )
    in_suite = any(guard.limit is not None for guard in guards)
    upper = "margin or per-task limit" if verdict.suites else "per-task limit" if in_suite else "margin"
    return _draw_drops("guards", lines, upper, label)


def _suite_line(suite: SuiteVerdict, label: str, detail: str) -> Line:
    return Line(
        label=label,
        detail=detail,
        numbers=wording.suite_change(suite),
        outcome=suite.outcome,
        word=suite.outcome,
        estimate=suite.drop,
        low=suite.low,
        high=suite.high,
        fail_limit=suite.max_drop,
        soft_limit=suite.margin,
    )


def _guard_line(guard: GuardVerdict, label: str, detail: str) -> Line:
    return Line(
        label=label,
        detail=detail,
        numbers=wording.drop(guard),
        outcome=guard.outcome,
        word=guard.word,
        estimate=guard.drop,
        low=guard.low,
        high=guard.high,
        fail_limit=guard.max_drop,
        soft_limit=guard.margin if guard.limit is None else guard.limit,
    )


def variants_plot(content: ReportContent) -> tuple[str, ...]:
    """Return the plots of the drops of all quantized variants: the mean of a suite, or else the largest drops.

    The result is empty if no variant was evaluated on a task.
    """
    lines: list[Line] = []
    upper = "margin"
    for variant in content.variants:
        suites, guards = (variant.gate.suites, variant.gate.guards) if variant.gate else ((), ())
        lines += [_suite_line(suite, variant.type, f"mean of {suite.tasks} tasks") for suite in suites]
        shown = () if suites else sorted(guards, key=lambda guard: -guard.drop)[:_SHOWN_GUARDS]
        lines += [_guard_line(guard, variant.type, guard.task) for guard in shown]
        if any(guard.limit is not None for guard in shown):  # a task of a suite that was decided before the others
            upper = "margin or per-task limit"
    if not lines:
        return ()
    label = "Drop of each quantized variant against the merge in points, with its interval. " + " ".join(
        f"{line.label}, {line.detail}: {line.numbers}, max_drop {wording.plain(line.fail_limit)}, {upper} "
        f"{wording.plain(line.soft_limit)}, {line.word}."
        for line in lines
    )
    return _draw_drops("variants", lines, upper, label)


def _draw_drops(name: str, lines: Sequence[Line], upper: str, label: str) -> tuple[str, ...]:
    """Draw drops in points. ``upper`` names the second limit of the lines."""
    has_margin = any(line.soft_limit != line.fail_limit for line in lines)
    names = ("zero", "max_drop", upper) if has_margin else ("zero", f"max_drop and {upper}")
    return draw_intervals(name, lines, 0.0, names, "drop in points", label)


def drift_plot(content: ReportContent) -> tuple[str, ...]:
    """Return the plots of the merge's perplexity over the better parent's, against warning and limit.

    The result is empty without a drift verdict.
    """
    drift = content.verdict.drift
    if drift is None:
        return ()
    line = Line(
        label="merge",
        detail=f"against {drift.reference}",
        numbers=wording.format_ratio(drift),
        outcome=drift.outcome,
        word=drift.outcome,
        estimate=drift.ratio,
        low=drift.low,
        high=drift.high,
        fail_limit=drift.max_ratio,
        soft_limit=drift.warn_ratio,
    )
    worst = sorted(drift.strata, key=lambda stratum: -stratum.low)[:_SHOWN_STRATA]
    strata = [
        Line(
            label=stratum.name,
            detail=format_count(stratum.documents, "document"),
            numbers=wording.stratum_ratio(stratum),
            outcome="fail" if stratum.failed else "pass",
            word="fail" if stratum.failed else "no alarm",
            estimate=stratum.ratio,
            low=stratum.low,
            high=stratum.high,
            fail_limit=drift.max_ratio,
            soft_limit=drift.warn_ratio,
        )
        for stratum in worst
    ]
    label = (
        f"Perplexity of the merge over that of {drift.reference}: {line.numbers}; warning above "
        f"{wording.plain(drift.warn_ratio)}, limit {wording.plain(drift.max_ratio)}, {line.word}."
        + "".join(f" {stratum.label}: {stratum.numbers}, {stratum.word}." for stratum in strata)
    )
    return draw_intervals("drift", [line, *strata], 1.0, ("equal", "limit", "warning"), "ratio", label)


def judge_plot(content: ReportContent) -> tuple[str, ...]:
    """Return the plots of the win rate's distance below 50 % and its limit. Empty without a judge."""
    judge = content.judge
    if judge is None:
        return ()
    line = Line(
        label="merge",
        detail=f"against {judge.reference}",
        numbers=f"{wording.number(50 - 100 * judge.win_rate, 1)} "
        + wording.interval(50 - 100 * judge.high, 50 - 100 * judge.low, 1),
        outcome=judge.outcome,
        word=judge.outcome,
        estimate=50 - 100 * judge.win_rate,
        low=50 - 100 * judge.high,
        high=50 - 100 * judge.low,
        fail_limit=judge.max_shortfall,
        soft_limit=judge.max_shortfall,
    )
    label = (
        f"Win rate of the merge against {judge.reference}, in points below an even one: {line.numbers}, limit "
        f"{wording.plain(judge.max_shortfall)}, {judge.outcome}."
    )
    return draw_intervals("judge", [line], 0.0, ("even", "limit"), "points below even", label)
