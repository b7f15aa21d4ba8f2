"""Build report pages of shadow deployments from hours of synthetic traffic, with the code that judges real traffic."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mergegate.flows.shadow_watch import LookEvidence, shadow_content
from mergegate.tasks import shadow
from mergegate.tasks.release.report import ShadowContent

BEGAN = 1_795_000_000.0
LEFT_OUT = {"another request of a session that has its pair": 4811, "parts that are no text": 212}
LEFT_OUT |= {"not answered well by both": 31}
LOST = (
    shadow.LostPair(
        id="r-1",
        at=BEGAN + 90_000,
        question="User: My invoice says 1 240 EUR, but we agreed on 1 200 net. Which one do I owe?\n\n"
        "Assistant: 1 240 EUR would be 1 200 EUR net with 3.3 % of tax.\n\nUser: That is no tax rate here.",
        parent="Then the invoice is wrong: with 20 % of tax it would be 1 440 EUR. Ask for a corrected one.",
        candidate="You owe 1 240 EUR.",
        reasoning="A notices that the numbers do not fit together and says what to do. B repeats the wrong number.",
    ),
    shadow.LostPair(
        id="r-2",
        at=BEGAN + 70_000,
        question="Write a limerick about <script>alert(1)</script> and unit tests",
        parent="There once was a test that was red…",
        candidate="",
        reasoning="B says nothing.",
    ),
)


def page_content(
    *,
    rates: tuple[float, float] = (0.24, 0.27),
    pairs: int = 300,
    serving: str = "watch",
    why: str = "",
    mode: str = "mirror",
    requests: int = 2_000,
    failing: float = 0.004,
    lost: Sequence[shadow.LostPair] = LOST,
) -> ShadowContent:
    """Return the report of a release that has been shadowed for a while.

    ``rates`` are the shares of pairs that the candidate wins and loses.
    """
    dice = random.Random(7)
    servers = {"parent": shadow.ShadowServer(url="http://p/v1"), "candidate": shadow.ShadowServer(url="http://c/v1")}
    settings = shadow.ShadowSettings(**servers, judge=shadow.ShadowJudge(url="http://j/v1", model="qwen3-32b"))
    scores = [1.0 if (roll := dice.random()) < rates[0] else 0.0 if roll < sum(rates) else 0.5 for _ in range(pairs)]
    consistent = [None if score == 0.5 and n % 3 == 0 else n % 7 > 0 for n, score in enumerate(scores)]
    times = [BEGAN + 330 * n for n in range(pairs)]
    judged = [shadow.JudgedPair(f"r-{n}", f"s-{n}", times[n], times[n], scores[n], consistent[n]) for n in range(pairs)]
    rows = []
    for n in range(requests):
        arm, role = ("parent", "answer") if n % 2 else ("candidate", "copy")
        status = 503 if arm == "candidate" and dice.random() < failing else 200
        seconds = dice.lognormvariate(-3.2, 0.4), dice.lognormvariate(0.2, 0.5)
        rows.append(shadow.ArmRow(BEGAN + 50 * n, arm, role, status, "", False, *seconds))
    hours = 27.5 if pairs else 0.0
    judged_totals = shadow.JudgedTotals(scores, 0.86, [n % 9 > 0 for n in range(90)], (41_000, 43_500), (0.4, 0.7))
    verdict = shadow.shadow_verdict("3f9a0c71b2de", judged_totals, rows, hours, settings)
    said = {"candidate": "3f9a0c71b2de", "mode": mode, "share": 0.1, "serving": serving, "since": BEGAN}
    routing = shadow.Routing(**said, why=why or verdict.reason)  # type: ignore[arg-type]
    evidence = LookEvidence(verdict, (), shadow.Sample((), 0, {}), (), {})
    if pairs:
        evidence = LookEvidence(verdict, judged, shadow.Sample((), 143, LEFT_OUT), lost, {"the queue was full": 12})
    return shadow_content("support-assistant", settings, routing, evidence, BEGAN + 100_000)


EVERY = {
    "watched": lambda: page_content(),
    "promoted": lambda: page_content(rates=(0.26, 0.24), failing=0.0, serving="promoted"),
    "rolled back": lambda: page_content(rates=(0.1, 0.45), pairs=120, serving="rolled back"),
    "killed": lambda: page_content(pairs=1, serving="killed", why="11 of the last 200 requests failed", failing=0.5),
    "nothing yet": lambda: page_content(pairs=0, requests=0),
    "split": lambda: page_content(pairs=0, requests=400, mode="split"),
}
