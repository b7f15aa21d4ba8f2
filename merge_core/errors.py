"""Define the few exception types of mergegate, and the findings that describe problems.

Every message has the same parts: *where* the problem is (file, field or tensor), the state that was *found*, the
*expected* state, and the *remedy*. The command line turns the type into an exit code and prints the message without a
traceback.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar, Literal

_LONGEST = 4000
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    r"\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)

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
"""Final status of a run, under the same name in history, pages, ``--json`` and Prefect. The last four are for a release
that is monitored in shadow mode."""

EXIT_CODES: Mapping[Status, int] = {
    "released": 0,
    "nothing new": 0,
    "passed": 0,
    "promoted": 0,
    "waiting": 0,  # for more evidence, or for approval
    "failed": 1,  # unexpected errors
    "invalid": 2,  # the user's input is wrong or missing
    "refused": 3,  # a check, the gate or the machine refuses well-formed input
    "rolled back": 3,  # users are worse off with the release
    "killed": 3,  # the release fails, or is far too slow
    "interrupted": 130,  # by Ctrl-C; the exit code that shells use
}
"""Exit code of a command for each status."""

INTERRUPTED = "interrupted; run it again and it resumes"


def state_name(status: str) -> str:
    """Return the name of the Prefect state for a status, such as ``NothingNew`` for ``nothing new``."""
    return status.title().replace(" ", "")


def to_printable(text: str) -> str:
    """Return untrusted ``text``, cut to 4,000 characters and with all characters escaped that are not printable.

    Escape sequences could overwrite the screen, and half a surrogate pair cannot be printed. Line breaks are kept.
    """
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def escape_invisible(text: str) -> str:
    """Return ``text`` with its control characters and bidirectional marks escaped, but not its spaces and joiners.

    Everything that shows names applies this function: the terminal, the card, the report and the public names.
    """
    return _INVISIBLE.sub(lambda match: to_printable(match[0]), text)


class MergegateError(Exception):
    """Base class of all errors that a user can cause. Only subclasses are raised.

    Args:
        location: File, field or tensor, as the user would name it (``recipe.yaml: models[1].parameters.densty``).
        found: Actual state.
        expected: Expected state.
        remedy: Instruction that fixes the problem.
    """

    status: ClassVar[Status] = "failed"  # status of a run that ends with this error

    def __init__(self, location: str, *, found: str, expected: str = "", remedy: str = "") -> None:
        self.where, self.found = to_printable(location), to_printable(found)
        self.expected, self.remedy = to_printable(expected), to_printable(remedy)
        super().__init__(str(self))

    @property
    def exit_code(self) -> int:
        """Exit code of a command that ends with this error."""
        return EXIT_CODES[self.status]

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.found}"]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.remedy:
            lines.append(f"  remedy:   {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled by their positional arguments, but these are keywords, and runs cross process
        # boundaries.
        return (_rebuild, (type(self), self.where, self.found, self.expected, self.remedy))


class InvalidInput(MergegateError):
    """The user's input has no valid meaning, for example an unknown key, a wrong header or a missing file."""

    status = "invalid"


class Refused(MergegateError):
    """A check or the gate refuses well-formed input, for example because of a license or a lost skill."""

    status = "refused"


class CannotDecide(MergegateError):
    """The run ended before a check could decide. This says nothing about the recipe, so no other recipe is tried."""

    status = "refused"


class ChangedInput(CannotDecide):
    """A file differs from the version that the run started with, or changed while it was read."""


class DiskUnavailable(CannotDecide):
    """The disk is full or read-only, a permission is missing, or a limit of the machine is reached.

    Once an operator has fixed this, the same run resumes.
    """


class OutOfTime(CannotDecide):
    """A time limit has expired."""


Severity = Literal["block", "warn", "info"]
_WORST_FIRST = ("block", "warn", "info")


@dataclass(frozen=True)
class Finding:
    """One problem that a check found.

    Args:
        severity: ``block`` if the result would be wrong or impossible, ``warn`` if the input may not be what the user
            meant, ``info`` for information only.
        where: Model, file, field or tensor.
        found: Actual state.
        expected: Expected state.
        remedy: Instruction that fixes the problem.
        cause: Text by which findings are grouped. Users see the first finding of a group and the number of others.
        is_invalid: Whether a finding that blocks is about input without a valid meaning. Otherwise, well-formed input
            is refused.
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
        """Return an InvalidInput with the text of the finding."""
        return InvalidInput(self.where, found=self.found, expected=self.expected, remedy=self.remedy)

    def refusal(self) -> MergegateError:
        """Return the exception with which the finding ends a run: InvalidInput or Refused."""
        kind = InvalidInput if self.is_invalid else Refused
        return kind(self.where, found=self.found, expected=self.expected, remedy=self.remedy)

    def as_warning(self, remedy: str) -> Finding:
        """Return a copy with the severity ``warn`` and the given remedy."""
        return replace(self, severity="warn", remedy=remedy)

    def content_key(self) -> object:
        """Return the fields that count in the key of an artifact: severity and text."""
        return {name: value for name, value in asdict(self).items() if name not in ("cause", "is_invalid")}


def finding_of(error: MergegateError) -> Finding:
    """Return a finding that blocks, with the text of an exception."""
    invalid = isinstance(error, InvalidInput)
    return Finding("block", error.where, error.found, error.expected, error.remedy, is_invalid=invalid)


class InvalidFile(InvalidInput):
    """A file has at least one fault. The message lists its faults and warnings, at most 100 of them.

    Args:
        location: File, as the user would name it.
        findings: Findings in the order of the file. At least one of them blocks.
    """

    _MOST_LISTED: ClassVar[int] = 100

    def __init__(self, location: str, findings: Iterable[Finding]) -> None:
        self.findings = worst_first(findings)
        warnings = sum(finding.severity != "block" for finding in self.findings)
        problems = len(self.findings) - warnings
        count = f"{problems} problem{'s' * (problems > 1)}"
        if warnings:
            count += f" and {warnings} warning{'s' * (warnings > 1)}"
        lines = [
            to_printable(f"\n  {_format_line(finding, location)}") for finding in self.findings[: self._MOST_LISTED]
        ]
        if (left_out := len(self.findings) - len(lines)) > 0:
            lines.append(f"\n  and {left_out} more")
        super().__init__(location, found=count)
        self.found = count + "".join(lines)  # each line is bounded, and no line may be missing
        self.args = (str(self),)

    def __reduce__(self) -> tuple[object, ...]:
        return (InvalidFile, (self.where, self.findings))


def _format_line(finding: Finding, file: str) -> str:
    """Return a finding in one line, such as ``models[0].model: '': expected a model; write a path``."""
    where = finding.where.removeprefix(file).removeprefix(": ").removeprefix(", ")
    found = f"{where}: {finding.found}" if where else finding.found
    expected = f"expected {finding.expected}" if finding.expected else ""
    line = "; ".join(filter(None, (found, expected, finding.remedy)))
    return line if finding.severity == "block" else f"warning: {line}"


def findings_of(error: MergegateError) -> tuple[Finding, ...]:
    """Return the findings that an exception reports. Only InvalidFile can report several."""
    return error.findings if isinstance(error, InvalidFile) else (finding_of(error),)


@dataclass
class FindingLog:
    """List to which a parser adds findings instead of raising the first one, so that users see all faults at once."""

    findings: list[Finding] = field(default_factory=list)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Catch an InvalidInput that is raised inside the block, and record it as a finding that blocks."""
        try:
            yield
        except InvalidInput as error:
            self.findings += findings_of(error)

    def fault(self, location: str, *, found: str, expected: str = "", remedy: str = "") -> None:
        """Record a finding that blocks because the input has no valid meaning."""
        self.findings.append(finding_of(InvalidInput(location, found=found, expected=expected, remedy=remedy)))

    def warn(self, location: str, *, found: str, expected: str = "", remedy: str = "") -> None:
        """Record a finding of the severity ``warn``."""
        location, found = to_printable(location), to_printable(found)
        self.findings.append(Finding("warn", location, found, to_printable(expected), to_printable(remedy)))

    @property
    def blocks(self) -> bool:
        """Whether any recorded finding blocks."""
        return any(finding.severity == "block" for finding in self.findings)

    def raise_faults(self, location: str) -> None:
        """Raise InvalidInput if any finding blocks. With several findings, raise :class:`InvalidFile` for all."""
        if self.blocks:
            raise self.findings[0].error() if len(self.findings) == 1 else InvalidFile(location, self.findings)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings without duplicates, sorted by severity and then in the original order."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: _WORST_FIRST.index(finding.severity)))


@dataclass(frozen=True)
class FindingGroup:
    """Findings with one cause: the most severe one, which represents the group, and all others."""

    first: Finding
    others: tuple[Finding, ...] = ()

    @property
    def severity(self) -> Severity:
        return self.first.severity

    def others_line(self) -> str:
        """Return a line like ``and 271 more with this cause: model.norm.weight, …``, with at most three locations.

        The line is empty if the group has only one finding.
        """
        if not self.others:
            return ""
        locations = [finding.where.removeprefix(f"{_model_of(finding)}: ") for finding in self.others[:3]]
        more = ", …" if len(self.others) > 3 else ""
        return f"and {len(self.others):,} more with this cause: {', '.join(locations)}{more}"


def group_findings(findings: Iterable[Finding]) -> tuple[FindingGroup, ...]:
    """Group findings by ``cause``, most severe first. Findings without a cause are grouped by text and model."""
    groups: dict[object, list[Finding]] = {}
    for finding in worst_first(findings):
        content = (finding.severity, _model_of(finding), finding.found, finding.expected, finding.remedy)
        groups.setdefault(finding.cause or content, []).append(finding)
    return tuple(FindingGroup(first, tuple(others)) for first, *others in groups.values())


def _model_of(finding: Finding) -> str:
    return finding.where.partition(": ")[0]


def pip_command(*requirements: str) -> str:
    """Return the command that installs packages into the environment of mergegate, for a remedy.

    Environments of ``uv tool`` have no pip, and plain ``pip`` does not install into those of ``uv tool`` and ``pipx``.
    """
    environment = Path(sys.prefix)
    if (environment / "uv-receipt.toml").is_file():
        command = f'uv pip install --python "$(uv tool dir)/{environment.name}"'
    elif (environment / "pipx_metadata.json").is_file():
        command = f"pipx runpip {environment.name} install"
    else:
        command = "pip install"
    return f"{command} {shlex.join(requirements)}"


def environment_command(python: Path, target: str, *requirements: str) -> str:
    """Return the command that builds the environment of ``python`` in the working directory, for a remedy.

    In a clone of mergegate, which has a file of constraints next to its Makefile, that is ``target``. In other
    directories, pip installs ``requirements``.
    """
    if Path("Makefile").is_file() and Path(f"{target.removesuffix('env')}constraints.txt").is_file():
        return f"make {target}"
    environment = python.parent.parent
    return f"python3 -m venv {environment} && {environment}/bin/pip install {shlex.join(requirements)}"


def suggest(word: str, names: Iterable[str]) -> str:
    """Return a remedy for an unknown ``word``: ``did you mean 'density'?``, or all ``names`` if none is similar.

    The remedy is empty if there are no names.
    """
    names = sorted(names)
    if not names:
        return ""
    close_matches = get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close_matches[0]!r}?" if close_matches else f"choose one of {', '.join(names)}"


def _rebuild(kind: type[MergegateError], location: str, found: str, expected: str, remedy: str) -> MergegateError:
    return kind(location, found=found, expected=expected, remedy=remedy)
