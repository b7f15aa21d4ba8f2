"""The few exception types of mergegate. Each is raised where the cause is known and carries what a person needs.

Every message has one shape: *where* it went wrong (file, field or tensor), what was *found*, what was *expected*, and
the *remedy*. The command line turns the type into an exit code and prints the message without a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from typing import ClassVar, Literal

_LONGEST = 4000

Status = Literal[
    "released",
    "nothing new",
    "passed",
    "failed",
    "invalid",
    "refused",
    "interrupted",
    "promoted",
    "waiting",
    "rolled back",
    "killed",
]
"""How a run ends. History, pages, ``--json`` and Prefect's states have the same words; the last four are those of a
release that is watched."""

EXIT_CODES: Mapping[Status, int] = {
    "released": 0,
    "nothing new": 0,
    "passed": 0,
    "promoted": 0,
    "waiting": 0,  # for more evidence, or for a person
    "failed": 1,  # what nobody foresaw
    "invalid": 2,  # what the user wrote or named is wrong, or is not there
    "refused": 3,  # a check, the gate or the machine says no to something well formed
    "rolled back": 3,  # users are worse served by it
    "killed": 3,  # it fails, or is far too slow
    "interrupted": 130,  # by Ctrl-C, as a shell says it
}
"""The one rule of what a command exits with."""

INTERRUPTED = "interrupted; run it again and it resumes"


def state_name(status: str) -> str:
    """What Prefect shows for a status: ``nothing new`` as ``NothingNew``."""
    return status.title().replace(" ", "")


def shown(text: str) -> str:
    """``text``, of which parts may be a stranger's, for a terminal, a log or a page: printable, and of bounded length.

    Escape sequences could rewrite what stands on the screen; half a character cannot be printed at all.
    """
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape", "surrogatepass").decode()
        for one in text
    )


class MergegateError(Exception):
    """Anything a user can cause. Never raised itself; see the subclasses.

    Args:
        where: File, field or tensor, as the user would name it (``recipe.yaml: models[1].parameters.densty``).
        found: What is there.
        expected: What should be there.
        remedy: What to do about it.
    """

    status: ClassVar[Status] = "failed"  # of a run that ends with it

    def __init__(self, where: str, *, found: str, expected: str = "", remedy: str = "") -> None:
        self.where, self.found = shown(where), shown(found)
        self.expected, self.remedy = shown(expected), shown(remedy)
        super().__init__(str(self))

    @property
    def exit_code(self) -> int:
        """Of a command that ends with it."""
        return EXIT_CODES[self.status]

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.found}"]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.remedy:
            lines.append(f"  remedy:   {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their positional arguments; ours are keywords, and runs cross process borders.
        return (_rebuild, (type(self), self.where, self.found, self.expected, self.remedy))


class InvalidInput(MergegateError):
    """A profile, recipe or checkpoint that cannot mean anything: unknown key, lying header, missing file."""

    status = "invalid"


class Refused(MergegateError):
    """A check or a gate said no to something well formed: a licence, a vocabulary, a lost skill."""

    status = "refused"


class ChangedInput(Refused):
    """A file is not what it was when it was pinned, or was changed while it was read.

    Unlike another refusal it is not about this merge alone: no remedy of the recipe helps, and nothing goes on.
    """


class DiskRefused(Refused):
    """The machine said no, not a check: a disk that is full or read-only, a missing right, a limit. It decides nothing
    about the input, so nothing else is tried instead; the same run goes on when there is room."""


class OutOfTime(DiskRefused):
    """A limit of time is over. Like a full disk it decides nothing about the input."""


Severity = Literal["block", "warn", "info"]
_WORST_FIRST = ("block", "warn", "info")


@dataclass(frozen=True)
class Finding:
    """What was found where, what was expected, and what to do about it.

    Args:
        severity: ``block``: the result would be wrong or impossible; ``warn``: it may not be what was meant; ``info``.
        where: Model, file, field or tensor.
        found: What is there.
        expected: What should be there.
        remedy: What to do.
        cause: Findings of one cause have the same text here; a person is told of the first, and how many there are.
        is_invalid: Of one that blocks: what the user wrote or named cannot mean anything; else it is well formed, and
            the answer is no.
    """

    severity: Severity
    where: str
    found: str
    expected: str = ""
    remedy: str = ""
    cause: str = ""
    is_invalid: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.found}"

    def error(self) -> InvalidInput:
        """The finding as an exception: the input cannot mean anything."""
        return InvalidInput(self.where, found=self.found, expected=self.expected, remedy=self.remedy)

    def refusal(self) -> MergegateError:
        """The finding as what ends a run."""
        kind = InvalidInput if self.is_invalid else Refused
        return kind(self.where, found=self.found, expected=self.expected, remedy=self.remedy)

    def softened(self, remedy: str) -> Finding:
        """The same as a warning, with another remedy."""
        return replace(self, severity="warn", remedy=remedy)

    def content_key(self) -> object:
        """What counts in a key or a digest: what it says."""
        return {name: text for name, text in asdict(self).items() if name not in ("cause", "is_invalid")}


def finding_of(error: MergegateError) -> Finding:
    """What was raised, as a finding that blocks."""
    invalid = isinstance(error, InvalidInput)
    return Finding("block", error.where, error.found, error.expected, error.remedy, is_invalid=invalid)


class InvalidFile(InvalidInput):
    """All faults of one file at once, with the warnings about it.

    Args:
        where: The file, as the user would name it.
        findings: At least one that blocks, in the order of the file.
    """

    _MOST_LISTED: ClassVar[int] = 100

    def __init__(self, where: str, findings: Iterable[Finding]) -> None:
        self.findings = worst_first(findings)
        warnings = sum(finding.severity != "block" for finding in self.findings)
        faults = len(self.findings) - warnings
        count = f"{faults} fault{'s' * (faults > 1)}"
        if warnings:
            count += f" and {warnings} warning{'s' * (warnings > 1)}"
        lines = [shown(f"\n  {_in_a_line(finding, where)}") for finding in self.findings[: self._MOST_LISTED]]
        if (left_out := len(self.findings) - len(lines)) > 0:
            lines.append(f"\n  and {left_out} more")
        super().__init__(where, found=count)
        self.found = count + "".join(lines)  # each line is bounded, and no line may be missing
        self.args = (str(self),)

    def __reduce__(self) -> tuple[object, ...]:
        return (InvalidFile, (self.where, self.findings))


def _in_a_line(finding: Finding, file: str) -> str:
    """``models[0].model: '': expected a model; write a path``. A warning begins with ``warning: ``."""
    where = finding.where.removeprefix(file).removeprefix(": ").removeprefix(", ")
    found = f"{where}: {finding.found}" if where else finding.found
    expected = f"expected {finding.expected}" if finding.expected else ""
    line = "; ".join(filter(None, (found, expected, finding.remedy)))
    return line if finding.severity == "block" else f"warning: {line}"


def findings_of(error: MergegateError) -> tuple[Finding, ...]:
    """Return everything that an exception reports, as findings."""
    return error.findings if isinstance(error, InvalidFile) else (finding_of(error),)


@dataclass
class FindingLog:
    """Findings that a reader collects while it reads on, so that a user sees all faults of a file at once."""

    findings: list[Finding] = field(default_factory=list)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Record an InvalidInput that is raised inside as a finding that blocks, and go on after the block."""
        try:
            yield
        except InvalidInput as error:
            self.findings += findings_of(error)

    def fault(self, where: str, *, found: str, expected: str = "", remedy: str = "") -> None:
        """Record a finding that blocks: the input cannot mean anything."""
        self.findings.append(finding_of(InvalidInput(where, found=found, expected=expected, remedy=remedy)))

    def warn(self, where: str, *, found: str, expected: str = "", remedy: str = "") -> None:
        """Record a warning."""
        self.findings.append(Finding("warn", shown(where), shown(found), shown(expected), shown(remedy)))

    @property
    def blocks(self) -> bool:
        """Whether a finding blocks."""
        return any(finding.severity == "block" for finding in self.findings)

    def raise_faults(self, where: str) -> None:
        """Raise all findings as one exception if one of them blocks.

        Raises:
            InvalidInput: The finding itself if there is only one, else :class:`InvalidFile`.
        """
        if self.blocks:
            raise self.findings[0].error() if len(self.findings) == 1 else InvalidFile(where, self.findings)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings by severity; those of equal severity stay in their order, repeated ones are dropped."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: _WORST_FIRST.index(finding.severity)))


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one cause: the worst, which stands for all, and the others."""

    first: Finding
    others: tuple[Finding, ...] = ()

    @property
    def severity(self) -> Severity:
        return self.first.severity

    def others_line(self, named: int = 3) -> str:
        """``and 271 more of this cause: model.layers.0.mlp.up_proj.weight, …``; empty for a finding that is alone."""
        if not self.others:
            return ""
        places = [one.where.removeprefix(f"{_model_of(one)}: ") for one in self.others[:named]]
        more = ", …" if len(self.others) > named else ""
        return f"and {len(self.others):,} more of this cause: {', '.join(places)}{more}"


def summed_up(findings: Iterable[Finding]) -> tuple[FindingGroup, ...]:
    """Findings by cause, worst first: those that say the same of one model, or name the same cause, are one group."""
    groups: dict[object, list[Finding]] = {}
    for one in worst_first(findings):
        said = (one.severity, _model_of(one), one.found, one.expected, one.remedy)
        groups.setdefault(one.cause or said, []).append(one)
    return tuple(FindingGroup(first, tuple(others)) for first, *others in groups.values())


def _model_of(finding: Finding) -> str:
    return finding.where.partition(": ")[0]


def suggest(word: str, known: Iterable[str]) -> str:
    """``"did you mean 'density'?"`` for the closest of ``known``, or the whole list when nothing is close."""
    known = sorted(known)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"


def _rebuild(kind: type[MergegateError], where: str, found: str, expected: str, remedy: str) -> MergegateError:
    return kind(where, found=found, expected=expected, remedy=remedy)
