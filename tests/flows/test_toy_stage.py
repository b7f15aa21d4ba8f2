"""A third-party stage needs only the steps that ``docs/how-to/extend-mergegate.md`` lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_project import Printed, Project
from prefect import flow
from pydantic import BaseModel, ConfigDict
from rich.console import Console

from mergegate.flows.attempt import JudgedMerge
from mergegate.flows.operations.summary import print_summary
from mergegate.flows.outcome import RunOutcome
from mergegate.flows.profile import load_profile
from mergegate.flows.release import JUDGMENTS, make_release
from mergegate.tasks.base.stage import Outcome, Section, StageValue, Verdict, value_stage
from mergegate.tasks.models.checkpoints import Model
from mergegate.tasks.release.report import as_markdown


class WeighSettings(BaseModel):
    """Settings that a profile would have under ``weigh``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    most: int


class Weighed(StageValue):
    """Size of the merge's weights, and the limit."""

    bytes: int
    most: int

    def summary(self) -> str:
        return f"{self.bytes:,} bytes"

    def as_verdict(self) -> Verdict:
        outcome: Outcome = "pass" if self.bytes <= self.most else "fail"
        return Verdict(
            name="weigh",
            outcome=outcome,
            publishable=outcome == "pass",
            reasons=() if outcome == "pass" else (f"weight: {self.bytes:,} bytes, limit {self.most:,}",),
            evidence=self,
            section=Section(
                title="On the scales <&>",
                sentences=("As heavy as its files.",),
                columns=("what", "bytes"),
                rows=(("merge", str(self.bytes)), ("limit", str(self.most))),
            ),
        )


@value_stage("weigh", version=1, subject="model")
def weigh(model: Model, settings: WeighSettings) -> Weighed:
    """Measure the bytes of a model's weights."""
    return Weighed(bytes=sum(file.stat().st_size for file in model.directory.glob("*.safetensors")), most=settings.most)


def release_with(project: Project, most: int, monkeypatch: pytest.MonkeyPatch) -> tuple[RunOutcome, list[str]]:
    """Release the demo in a flow with one more judgment; return the outcome and the names of the weighed models."""
    weighed: list[str] = []

    def by_weight(merge: JudgedMerge) -> Verdict | None:
        weighed.append(merge.model.name)
        return weigh(merge.model, WeighSettings(most=most)).value.as_verdict()

    @flow
    def my_release(profile: Path) -> RunOutcome:
        return make_release(load_profile(profile), judgments=(*JUDGMENTS, by_weight))

    monkeypatch.chdir(project.root)
    monkeypatch.setenv("MERGEGATE_HOME", str(project.home))
    return my_release(Path("profiles/demo.yaml")), weighed


@pytest.mark.proof
def test_a_custom_stage_can_refuse_a_release_and_has_a_section_in_report_summary_and_prefects_page(
    demo: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, weighed = release_with(demo, 1000, monkeypatch)
    assert weighed == ["merge"]
    assert (outcome.status, outcome.exit_code) == ("refused", 3)
    assert outcome.reasons[-1].startswith("weight:")
    assert outcome.content is not None
    assert outcome.content.verdict.reasons[-1].startswith("weight:")
    assert demo.artifacts("weigh")

    outcome, _ = release_with(demo, 10**9, monkeypatch)
    assert outcome.status in ("released", "nothing new")
    assert outcome.content is not None
    assert outcome.report is not None
    page = outcome.report.read_text(encoding="utf-8")
    assert "On the scales &lt;&amp;&gt;" in page
    assert "As heavy as its files." in page
    assert "1000000000" in page.replace("<wbr>", "")
    assert r"### On the scales \<\&\>" in as_markdown(outcome.content)
    assert "| limit | 1000000000 |" in as_markdown(outcome.content)
    console = Console(record=True, width=120)
    print_summary(console, outcome)
    assert "On the scales <&>" in console.export_text()


def test_a_custom_stage_that_is_not_configured_leaves_no_trace(released: tuple[Project, Printed]) -> None:
    project, printed = released
    assert "scales" not in printed.output
    (place,) = (line.split()[1] for line in printed.output.splitlines() if line.startswith("  release "))
    assert "scales" not in (project.root / place / "report.html").read_text(encoding="utf-8")
