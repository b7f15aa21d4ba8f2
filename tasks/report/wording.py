"""How the report says things: numbers, sizes and the sentence under the verdict. Pure functions of values."""

from __future__ import annotations

import re

from mergegate.tasks.gate import DriftVerdict, GateVerdict, GuardVerdict, SuiteVerdict
from mergegate.tasks.report.content import ReportContent, ReportedModel
from mergegate.tasks.stage import Outcome

MINUS, TIMES, NONE = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
NOT_FINITE = "not finite"
GLYPHS: dict[Outcome, str] = {"pass": "✓", "fail": "✗", "inconclusive": "?"}


def number(value: float, decimals: int) -> str:
    """Fixed decimals with a real minus sign, and never a negative zero."""
    text = f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def plain(value: float) -> str:
    """A threshold as a person would write it: 3, 2.5; of the mean of several, which nobody wrote, two decimals."""
    text = f"{value:g}"
    if len(text.partition(".")[2]) > 4 and abs(value) >= 0.1 and "e" not in text:
        text = f"{value:.2f}"
    return text.replace("-", MINUS)


def interval(low: float, high: float, decimals: int) -> str:
    return f"[{number(low, decimals)}, {number(high, decimals)}]"


def what_was_asked(verdict: GateVerdict) -> str:
    """Each guarded task with the digest of its data, and the datasets behind it at the commits that are known:
    ``gsm8k 3f2a… (openai/gsm8k at 9c1d…)``. Empty where nobody looked."""
    named = {}
    for guard in verdict.guards:
        if guard.data is not None:
            known = {f"{source.path} at {source.revision[:12]}" for source in guard.data.sources if source.revision}
            behind = f" ({', '.join(sorted(known))})" if known else ""
            named[guard.task] = f"{guard.task} {guard.data.digest[:12]}{behind}"
    return "; ".join(named.values())


def guard_decimals(guard: GuardVerdict) -> int:
    """The fewest decimals (1 to 3) that leave every bound on its own side of its limit: 3.04 is not within 3. A loss
    that is shown to be one is not shown as zero."""
    pairs = [(bound, limit) for bound in (guard.drop, guard.high) for limit in (guard.max_drop, guard.margin)]
    shown_worse = [(guard.low, 0.0)] * (guard.low > 0)
    return _decimals_that_keep_order([*pairs, *shown_worse], fewest=1, most=3)


def drift_decimals(drift: DriftVerdict) -> int:
    """The fewest decimals (3 to 5) that leave the ratio and its bounds on their own side of the limits."""
    # Far from the limits, digits say nothing.
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
    """'4.1 [2.3, 5.9]', in points; negative where the merge is better."""
    decimals = guard_decimals(guard)
    return f"{number(guard.drop, decimals)} {interval(guard.low, guard.high, decimals)}"


def limit(guard: GuardVerdict) -> str:
    """'3', or '3, margin 4' where the two differ; '11 alone' for a task of a suite."""
    if guard.limit is not None:
        return f"{plain(guard.limit)} alone"
    if guard.margin == guard.max_drop:
        return plain(guard.max_drop)
    return f"{plain(guard.max_drop)}, margin {plain(guard.margin)}"


def format_ratio(drift: DriftVerdict) -> str:
    """'1.003 [0.998, 1.008]', or that there is none."""
    if drift.ratio is None:
        return NOT_FINITE
    if drift.ratio >= 10_000:
        return _scientific(drift.ratio)  # how much worse than broken it is interests nobody
    decimals = drift_decimals(drift)
    if drift.low is None or drift.high is None:
        return number(drift.ratio, decimals)
    return f"{number(drift.ratio, decimals)} {interval(drift.low, drift.high, decimals)}"


def format_magnitude(value: float | None) -> str:
    """A perplexity or bits per byte, whatever its size."""
    if value is None:
        return NOT_FINITE
    if value >= 1e6:
        return _scientific(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"


def _scientific(value: float) -> str:
    """'2.8e10', '1e6'."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def title(verdict: GateVerdict) -> str:
    """The one big word."""
    return {"pass": "Passed", "fail": "Refused", "inconclusive": "Undecided"}[verdict.outcome]


def consequence(content: ReportContent) -> str:
    """What follows from the verdict, for whoever would publish; empty where nothing was merged and all is said."""
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
    """Where a model of the Hub can be looked at, at its commit; empty for any other."""
    name = model.ref.partition("@")[0].partition("+")[0]
    if not model.revision or not _HUB_NAME.fullmatch(name) or not re.fullmatch(r"[0-9a-f]{40}", model.revision):
        return ""
    return f"https://huggingface.co/{name}/tree/{model.revision}"


def licence(content: ReportContent) -> str:
    """What comes before the licence's name. Of a merge that is refused nothing may be published, under no licence."""
    if content.verdict.publishable:
        return "The merge may be published under"
    return "By the licences of its parents the merge would carry"


def sentence(content: ReportContent) -> str:
    """Why: the worst reason of a refusal, or the narrowest of the passed guards."""
    verdict = content.verdict
    if verdict.reasons:
        return verdict.reasons[0]
    notes = (f"{note}." for note in verdict.notes)
    return " ".join(part for part in (_guards_passed(verdict), *notes, _drift_passed(verdict.drift)) if part)


def _guards_passed(verdict: GateVerdict) -> str:
    if not verdict.guards:
        return "" if verdict.notes else "No task is guarded."
    if verdict.suites:
        return " ".join(map(_suite_passed, verdict.suites))
    closest = min(verdict.guards, key=lambda guard: guard.margin - guard.high)
    decimals = guard_decimals(closest)
    most, allowed = number(closest.high, decimals), plain(closest.margin)
    if len(verdict.guards) == 1:
        return f"{closest.task} loses at most {most} points against {closest.reference}; {allowed} are allowed."
    count = "Both" if len(verdict.guards) == 2 else f"All {len(verdict.guards)}"
    return (
        f"{count} guards hold. The closest is {closest.task}, which loses at most {most} points against "
        f"{closest.reference}; {allowed} are allowed."
    )


def _suite_passed(suite: SuiteVerdict) -> str:
    most, allowed = number(suite.high, 1), plain(suite.margin)
    return (
        f"The mean of {suite.tasks} tasks loses at most {most} points against {suite.reference}; {allowed} are "
        "allowed, and no task has fallen far."
    )


def cut_off_answers(content: ReportContent) -> tuple[str, ...]:
    """Return a warning for each task and model whose answers did not all end by themselves."""
    return tuple(
        f"{task}: {ends.described().replace(' answers', f' answers of {model.name}')}; its score understates the model"
        for model in content.models
        if model.scores is not None
        for task, ends in model.scores.ends.items()
        if ends.cut_off
    )


def documents_saved(verdict: GateVerdict) -> str:
    """What looking a part at a time, and not running what could change nothing, has saved; empty where all documents
    were asked, or nothing was decided early."""
    seen = {guard.task: (guard.look.documents, guard.documents_left) for guard in verdict.guards if guard.look}
    seen |= {left_out.task: (0, left_out.documents) for left_out in verdict.not_run}
    asked, left = (sum(counts) for counts in zip(*seen.values(), strict=True)) if seen else (0, 0)
    if not left:
        return ""
    share = 100 * left / (asked + left)
    tasks = len({left_out.task for left_out in verdict.not_run})
    what = "looking at a part of them first"
    if tasks:
        what += f" and leaving out {tasks} task{'' if tasks == 1 else 's'} that could change nothing"
    return f"{asked:,} of {asked + left:,} documents were asked; {what} saved {share:.0f} %."


def suite_change(suite: SuiteVerdict) -> str:
    """'0.4 [-0.3, 1.1]', in points, with real minus signs."""
    return f"{number(suite.drop, 1)} {interval(suite.low, suite.high, 1)}"


def _drift_passed(drift: DriftVerdict | None) -> str:
    if drift is None or drift.ratio is None:
        return ""
    value = number(drift.ratio, drift_decimals(drift))
    return f"Perplexity is {value} times that of the better parent; {plain(drift.max_ratio)} is the limit."
