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
    "watch": "Watched",
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
    """Return the reason for the current routing as a sentence."""
    return sentence_case(content.reason)


def routing_sentence(content: ShadowContent) -> str:
    """Return a sentence that tells which server answers users now."""
    share = _percent(content.share)
    return {
        "promoted": "All requests are answered by the candidate."
        + (f" At its target it is called {content.alias}." if content.alias else ""),
        "rolled back": "All requests are answered by the parent, and nothing is copied.",
        "killed": "All requests are answered by the parent, and nothing is copied: the kill switch asks no statistics.",
        "watch": f"Users are answered by the parent; {share} of their requests are copied to the candidate."
        if content.mode == "mirror"
        else f"{share} of the users are answered by the candidate, always the same ones.",
    }[content.serving]


def evidence_text(log_e: float, confidence: float) -> str:
    """Return the evidence and the value at which it decides: '7.4, decided at 20'."""
    return f"{e_value(log_e)}, decided at {wording.plain(round(1 / (1 - confidence), 6))}"


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
        action = "copied to the candidate" if content.mode == "mirror" else "answered by the candidate"
        yield "serving", f"the parent; {_percent(content.share)} of the requests {action}"
    else:
        promoted = content.serving == "promoted"
        yield "serving", "the candidate" if promoted else f"the parent: the candidate was {content.serving}"
    yield "watched", f"{format_duration(3600 * content.hours)} ({wording.plain(content.minimum_hours)} h at least)"
    counts = f"{content.wins:,} won, {content.ties:,} tied, {content.losses:,} lost"
    yield "pairs", f"{content.pairs:,} ({content.minimum_pairs:,} at least): {counts}"
    if now is None:
        yield "win rate", "no pair is judged yet"
    else:
        bounds = wording.interval(100 * now.low, 100 * now.high, 1)
        yield "win rate", f"{_percent(now.win_rate, 1)} {bounds}"
        if content.consistency is not None:
            yield "judge", f"the same in both orders in {_percent(content.consistency, 0)}"
        yield "evidence for it", evidence_text(now.log_e_promote, content.confidence)
        yield "evidence against", evidence_text(now.log_e_rollback, content.confidence)


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


ARM_COLUMNS = ("Requests", "Failed", "First byte", "95 %", "Whole answer", "95 %")


def _percent(share: float, decimals: int | None = None) -> str:
    return f"{wording.plain(round(100 * share, 4)) if decimals is None else wording.number(100 * share, decimals)} %"
