"""Describe a release that is tested on user traffic, and render its page in the design of a release's report.

Rates are shares in [0, 1], and times are in seconds. Evidence is a natural logarithm, because it exceeds the range of a
float. The plots show the win rate with its interval over time, and the evidence for and against the candidate.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.wording import format_duration
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.release.report import wording
from mergegate.tasks.release.report.page import render_page
from mergegate.tasks.release.report.plots import DASHED, Ink, Key, Layout, TextStyle, chart, draw_twice, ticks, write

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

_OUTCOMES: dict[str, Outcome] = {"promoted": "pass", "watch": "inconclusive", "rolled back": "fail", "killed": "fail"}
_HOUR = 3600.0
_LOWEST_E = math.log(0.01)  # lower evidence is drawn at this value
_ROOM = 4.0  # margin above and below, in points
_BOXES = ((58, 12, 260, 18), (48, 6, 210, 18))  # of a plot on a wide and on a narrow page; see ``chart``
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_DIGITS_OF_E = 4  # numbers with larger exponents are displayed as powers of ten
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


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShadowPoint(_Part):
    """Evidence after a number of judged pairs."""

    pairs: int = Field(ge=0)
    at: float  # Unix time of the newest request among the pairs
    win_rate: float
    low: float  # lower end of the interval, which is valid at all interim looks
    high: float
    log_e_promote: float
    log_e_rollback: float


class ReportedArm(_Part):
    """Requests to one of the two servers: failures and latency."""

    requests: int = Field(ge=0)
    failed: int = Field(ge=0)
    low: float = 0.0  # lower end of the interval of the failure rate, valid at all interim looks
    high: float = 1.0
    fallbacks: int = 0  # for the candidate: number of requests that the parent answered instead
    first_byte: tuple[float, float, float] | None = None  # median, 95 %, 99 %; None without responses
    seconds: tuple[float, float, float] | None = None

    @property
    def rate(self) -> float:
        """Share of requests that failed."""
        return self.failed / self.requests if self.requests else 0.0


class LostExample(_Part):
    """A pair that the candidate lost. All of its text is untrusted."""

    at: float  # Unix time
    question: str
    parent: str
    candidate: str
    reasoning: str


class ShadowContent(_Part):
    """All content of the page of a watched release."""

    name: str
    candidate: str  # version of the candidate
    serving: Literal["watch", "promoted", "rolled back", "killed"]  # current routing of requests
    reason: str  # reason for the routing, or the evidence that is still missing, as a sentence
    looked: float  # Unix time of the last look
    hours: float = Field(ge=0)  # duration of the watch, in hours
    mode: Literal["mirror", "split"]
    share: float = Field(ge=0, le=1)  # share of the traffic that the candidate receives during the watch
    margin: float  # largest distance of the win rate below 50 %, in points
    confidence: float
    minimum_hours: float
    minimum_pairs: int
    judge: str
    wins: int = Field(ge=0)
    ties: int = Field(ge=0)
    losses: int = Field(ge=0)
    identical: int = Field(ge=0)  # ties with equal answers
    consistency: float | None = None  # share of all other pairs with the same judgment in both orders
    controls: tuple[int, int] = (0, 0)  # control pairs that the judge found, of all
    length_ratio: float | None = None  # length of the candidate's answers relative to the parent's
    cut_off: tuple[float, float] = (0.0, 0.0)  # answers cut off by the token limit in percent: parent, candidate
    points: tuple[ShadowPoint, ...] = ()  # Evidence over time. The last point is the current state.
    waiting: int = Field(default=0, ge=0)  # number of pairs that the next interim look will judge
    left_out: tuple[tuple[str, int], ...] = ()  # number of recorded pairs that are not judged, by reason
    parent_arm: ReportedArm
    candidate_arm: ReportedArm
    errors: str  # comparison of the two servers' errors, as a sentence
    not_recorded: tuple[tuple[str, int], ...] = ()  # number of requests that the proxy could not record, by reason
    examples: tuple[LostExample, ...] = ()  # Lost pairs, newest first. They are stored no longer than the records.
    retention_days: float = 30.0  # number of days for which the records are stored
    alias: str = ""  # Name of a promoted candidate at its target. Empty without a name.

    @property
    def pairs(self) -> int:
        """Number of judged pairs."""
        return self.wins + self.ties + self.losses

    @property
    def now(self) -> ShadowPoint | None:
        """Current evidence, or None before the first pair."""
        return self.points[-1] if self.points else None


def shadow_outcome(content: ShadowContent) -> Outcome:
    """Return the outcome: pass if the candidate was promoted, inconclusive while it is watched, else fail."""
    return _OUTCOMES[content.serving]


def shadow_sentence(content: ShadowContent) -> str:
    """Return the reason for the current routing as a sentence, without its period."""
    return wording.sentence_case(content.reason)


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
    return {
        "watch": "No action is needed: each interim look promotes the candidate, rolls it back, or continues to watch.",
        "promoted": "No action is needed. To undo the promotion, use the rollback command below.",
        "killed": "Next: find the cause in the log of the candidate's server, then correct the server or the recipe.",
        "rolled back": "Next: read the lost answers below, correct the recipe or the guards, and release a new "
        "candidate.",
    }[content.serving]


def evidence_text(log_e: float, confidence: float) -> str:
    """Return the e-value and the value at which it decides: '7.4, decides at 20'."""
    return f"{e_value(log_e)}, decides at {wording.plain(round(1 / (1 - confidence), 6))}"


def e_value(log_e: float) -> str:
    """Return the e-value as text: '0.03', '7.4', '10¹²'."""
    power = log_e / math.log(10)
    if abs(power) > _DIGITS_OF_E:
        return _power_of_ten(round(power))
    value = math.exp(log_e)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _power_of_ten(power: int) -> str:
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
        return
    yield "win rate", f"{_percent(now.win_rate, 1)} {wording.interval(100 * now.low, 100 * now.high, 1)}"
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
    rate = f"{_percent(arm.rate, 2)} {wording.interval(100 * arm.low, 100 * arm.high, 2)}"
    values = [seconds for quantiles in (arm.first_byte, arm.seconds) for seconds in (quantiles or (None, None))[:2]]
    return (
        f"{arm.requests:,}",
        rate if arm.requests else wording.NONE,
        *(
            wording.NONE if value is None else f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"
            for value in values
        ),
    )


def _percent(share: float, decimals: int | None = None) -> str:
    return f"{wording.plain(round(100 * share, 4)) if decimals is None else wording.number(100 * share, decimals)} %"


def render_shadow(content: ShadowContent) -> str:
    """Return the page of the release as HTML, without scripts or external resources. Equal content gives equal text."""
    return render_page(
        "shadow.html",
        "reading.css",
        "shadow.css",
        content=content,
        words=sys.modules[__name__],
        round=round,
        page_outcome=shadow_outcome(content),
        win_rate=_win_rate_plot(content) if len(content.points) > 1 else (),
        evidence=_evidence_plot(content) if len(content.points) > 1 else (),
        when=lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        arms=[("parent", content.parent_arm), ("candidate", content.candidate_arm)],
    )


def _win_rate_plot(content: ShadowContent) -> tuple[Markup, ...]:
    points, last = content.points, content.points[-1]
    in_hours = last.at - points[0].at >= 2 * _HOUR
    times = [(point.at - points[0].at) / (_HOUR if in_hours else 60) for point in points]
    bound = 50 - content.margin
    # Leave out the first pairs. Their interval covers the full range and would hide the later ones.
    late = points[len(points) // 4 :]
    low = min(bound, *(100 * point.low for point in late)) - _ROOM
    high = max(50.0, *(100 * point.high for point in late)) + _ROOM
    interval = f"interval, {100 * content.confidence:g} % on each side"
    promotion = f"promotion: interval above {wording.plain(bound)} %"
    keys: list[Key] = [
        {"label": "win rate", "color": Ink.TEXT.value, "linewidth": 2.4},
        {"label": interval, "color": Ink.ACCENT.value, "linewidth": 6, "alpha": 0.3},
        {"label": promotion, "color": Ink.INCONCLUSIVE.value, **DASHED},
    ]

    def draw(layout: Layout) -> Figure:
        start = datetime.fromtimestamp(points[0].at, UTC).strftime("%Y-%m-%d %H:%M")
        figure, axes = chart(layout, keys, _BOXES[layout.narrow], foot=48, narrow_columns=1)
        write(
            axes,
            (1, 0),
            f"{'hours' if in_hours else 'minutes'} since {start} UTC",
            TextStyle(align="right", ink=Ink.MUTED),
            shift=(0, 36),
        )
        axes.set_xlim(0, max(times[-1], 1e-6) * 1.01)
        axes.set_ylim(max(0.0, low), min(100.0, high))
        ticks(axes, "x", 5 if layout.narrow else 8)
        ticks(axes, "y", 5)
        band: dict[str, Any] = {"color": Ink.ACCENT.value, "alpha": 0.22, "linewidth": 0, "step": "post"}
        axes.fill_between(times, [100 * point.low for point in points], [100 * point.high for point in points], **band)
        axes.axhline(50, color=Ink.MUTED.value, linewidth=1)
        axes.axhline(bound, color=Ink.INCONCLUSIVE.value, **DASHED)
        rates = [100 * point.win_rate for point in points]
        axes.plot(times, rates, color=Ink.TEXT.value, linewidth=2.4, drawstyle="steps-post")
        return figure

    result = f"{100 * last.win_rate:.1f} %, interval {100 * last.low:.1f} to {100 * last.high:.1f} %"
    return draw_twice("win-rate", f"Win rate of the candidate over time: after {last.pairs} pairs {result}.", draw)


def _evidence_plot(content: ShadowContent) -> tuple[Markup, ...]:
    points, last = content.points, content.points[-1]
    threshold = -math.log1p(-content.confidence)
    pairs = [point.pairs for point in points]
    top = max(threshold, *(max(point.log_e_promote, point.log_e_rollback) for point in points))
    promotion: Key = {"color": Ink.PASS.value, "linewidth": 2.4}
    rollback: Key = {"color": Ink.FAIL.value, "linewidth": 2.0, "linestyle": (0, (5, 2))}
    decision: Key = {"color": Ink.INCONCLUSIVE.value, **DASHED}
    keys = [{"label": "for promotion", **promotion}, {"label": "for rollback", **rollback}]
    keys.append({"label": f"decides at {e_value(threshold)}", **decision})

    def draw(layout: Layout) -> Figure:
        figure, axes = chart(layout, keys, _BOXES[layout.narrow], foot=48, narrow_columns=1)
        write(axes, (1, 0), "judged pairs", TextStyle(align="right", ink=Ink.MUTED), shift=(0, 36))
        axes.set_xlim(0, pairs[-1] * 1.01)
        axes.set_ylim(_LOWEST_E - 0.3, top + 0.08 * (top - _LOWEST_E))
        ticks(axes, "x", 5 if layout.narrow else 8, integer=True)
        # Label a handful of powers of ten.
        highest = max(1, math.ceil(top / math.log(10)))
        step = max(1, math.ceil((highest + 2) / 6))
        powers = [power for power in range(-2, highest + 1) if power % step == 0 and power * math.log(10) >= _LOWEST_E]
        labels = [f"{10.0**power:g}" if -3 < power < 4 else _power_of_ten(power) for power in powers]
        axes.set_yticks([power * math.log(10) for power in powers], labels)
        axes.axhline(threshold, **decision)
        axes.plot(pairs, [max(point.log_e_promote, _LOWEST_E) for point in points], **promotion)
        axes.plot(pairs, [max(point.log_e_rollback, _LOWEST_E) for point in points], **rollback)
        return figure

    label = (
        f"E-values over judged pairs: for promotion {e_value(last.log_e_promote)}, for rollback "
        f"{e_value(last.log_e_rollback)}. The test decides at {e_value(threshold)}."
    )
    return draw_twice("evidence", label, draw)
