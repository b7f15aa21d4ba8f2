"""Describe the state of a watched release: its title, sentence and numbers. All functions are pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mergegate.merge_core.wording import format_duration
from mergegate.tasks.report import wording
from mergegate.tasks.report.shadow.content import ReportedArm, ReportedRouting, ShadowContent
from mergegate.tasks.report.sweep.wording import sentence_case
from mergegate.tasks.stage import Outcome

_OUTCOMES: dict[ReportedRouting, Outcome] = {
    "promoted": "pass",
    "watch": "inconclusive",
    "rolled back": "fail",
    "killed": "fail",
}
_TITLES: dict[ReportedRouting, str] = {
    "promoted": "Promoted",
    "watch": "Watching",
    "rolled back": "Rolled back",
    "killed": "Killed",
}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_DIGITS_OF_E = 4  # numbers with larger exponents are displayed as powers of ten


def shadow_outcome(content: ShadowContent) -> Outcome:
    """Return the outcome: pass if the candidate was promoted, inconclusive while it is watched, else fail."""
    return _OUTCOMES[content.serving]


def shadow_title(content: ShadowContent) -> str:
    """Return the headline of the page: one or two words."""
    return _TITLES[content.serving]


def shadow_sentence(content: ShadowContent) -> str:
    """Return the reason for the current routing as a sentence, without its period."""
    return sentence_case(content.reason)


def routing_sentence(content: ShadowContent) -> str:
    """Return a sentence that tells which server answers users now."""
    share = _percent(content.share)
    return {
        "promoted": "The candidate answers all requests."
        + (f" The target has it under the name {content.alias}." if content.alias else ""),
        "rolled back": "The parent answers all requests. The candidate receives no traffic.",
        "killed": "The parent answers all requests. The candidate receives no traffic. The kill switch acts on errors "
        "and latency alone, without waiting for a verdict on quality.",
        "watch": f"The parent answers all users. {share} of the requests are copied to the candidate."
        if content.mode == "mirror"
        else f"The candidate answers {share} of the users, always the same ones. The parent answers the others.",
    }[content.serving]


def shadow_next_step(content: ShadowContent) -> str:
    """Return a sentence that tells the reader what to do now."""
    if content.serving == "watch":
        return "No action is needed: each interim look promotes the candidate, rolls it back, or continues to watch."
    if content.serving == "promoted":
        return "No action is needed. To undo the promotion, use the rollback command below."
    if content.serving == "killed":
        return "Next: find the cause in the log of the candidate's server, then correct the server or the recipe."
    return "Next: read the lost answers below, correct the recipe or the guards, and release a new candidate."


def evidence_text(log_e: float, confidence: float) -> str:
    """Return the e-value and the value at which it decides: '7.4, decides at 20'."""
    return f"{e_value(log_e)}, decides at {wording.plain(round(1 / (1 - confidence), 6))}"


def e_value(log_e: float) -> str:
    """Return the e-value as text: '0.03', '7.4', '10¹²'."""
    power = log_e / math.log(10)
    if abs(power) > _DIGITS_OF_E:
        return power_of_ten(round(power))
    value = math.exp(log_e)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def power_of_ten(power: int) -> str:
    return f"10{str(power).translate(_SUPERSCRIPTS)}"


def shadow_rows(content: ShadowContent) -> Iterator[tuple[str, str]]:
    """Yield name and value for each row of the table that describes the current state."""
    now = content.now
    if content.serving == "watch":
        share = _percent(content.share)
        mirrored = f"{share} of the requests are copied to the candidate"
        rest = mirrored if content.mode == "mirror" else f"the candidate answers {share} of the users"
        yield "serving", f"the parent; {rest}"
    else:
        promoted = content.serving == "promoted"
        yield "serving", "the candidate" if promoted else f"the parent: the candidate was {content.serving}"
    yield "watched", f"{format_duration(3600 * content.hours)} (at least {wording.plain(content.minimum_hours)} h)"
    counts = f"{content.wins:,} won, {content.ties:,} tied, {content.losses:,} lost"
    yield "pairs", f"{content.pairs:,} (at least {content.minimum_pairs:,}): {counts}"
    if now is None:
        yield "win rate", "no pair has been judged yet"
    else:
        bounds = wording.interval(100 * now.low, 100 * now.high, 1)
        yield "win rate", f"{_percent(now.win_rate, 1)} {bounds}"
        if content.consistency is not None:
            yield "judge agreement", f"same judgment in both orders for {_percent(content.consistency, 0)} of the pairs"
            found, controls = content.controls
            yield "control pairs", f"the judge found {found:,} of {controls:,}"
        if content.length_ratio is not None:
            parent, candidate = (wording.number(share, 1) for share in content.cut_off)
            ratio = wording.number(content.length_ratio, 2)
            yield "answers", f"{ratio} times as long as the parent's; cut off: {candidate} % (parent {parent} %)"
        yield "promote e-value", evidence_text(now.log_e_promote, content.confidence)
        yield "rollback e-value", evidence_text(now.log_e_rollback, content.confidence)


def arm_cells(arm: ReportedArm) -> tuple[str, ...]:
    """Return the table cells for an arm: requests, failure rate, and quantiles of first byte and whole answer."""
    bounds = wording.interval(100 * arm.low, 100 * arm.high, 2)
    rate = f"{_percent(arm.rate, 2)} {bounds}" if arm.requests else wording.NONE
    values = [seconds for quantiles in (arm.first_byte, arm.seconds) for seconds in (quantiles or (None, None))[:2]]
    return (
        f"{arm.requests:,}",
        rate,
        *(
            wording.NONE if value is None else f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"
            for value in values
        ),
    )


# Short names of the cells for the terminal, and their full names for the page.
ARM_COLUMNS = ("Requests", "Failed", "First byte", "p95", "Whole answer", "p95")
ARM_LABELS = (
    "Requests",
    "Failed requests",
    "First byte, median",
    "First byte, 95th percentile",
    "Whole answer, median",
    "Whole answer, 95th percentile",
)


def _percent(share: float, decimals: int | None = None) -> str:
    return f"{wording.plain(round(100 * share, 4)) if decimals is None else wording.number(100 * share, decimals)} %"
