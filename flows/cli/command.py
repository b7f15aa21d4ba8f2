"""Define what all commands share: the types of common options, the console, and the exit code and message of an error.

``merge_core.errors.EXIT_CODES`` maps every outcome to its exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergegate.flows.operations import command_line, convert_os_error
from mergegate.merge_core.errors import (
    EXIT_CODES,
    DiskUnavailable,
    Finding,
    InvalidInput,
    MergegateError,
    Status,
    findings_of,
)

if TYPE_CHECKING:
    from rich.console import Console


def local_path(text: str | Path) -> Path:
    """Parse a path on the command line. Defer the import of pydantic, which is slow."""
    from mergegate.merge_core.parsing import parse_path

    return parse_path(os.fspath(text))


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log cache keys, store accesses, file reads and subprocesses.")
]
ApproveOption = Annotated[
    bool,
    typer.Option(
        "--approve", help="Approve publication or promotion without a prompt, if the profile requires approval."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of the profile, for example evaluate.documents=200. Repeatable.",
    ),
]
PriceOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=USD", help="Hourly price of an instance. Repeatable.")
]
DeviceOption = Annotated[
    str, typer.Option(metavar="auto|cpu|cuda[:N]", help="Device of the merge. Without a number, cuda is all GPUs.")
]
SameOutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="The same as OUT.", show_default=False)]
GuardsOption = Annotated[Path, typer.Option("--profile", "-p", help="Profile with the evidence and the guards.")]
ReleaseArgument = Annotated[
    str, typer.Argument(help="Release: a directory, or org/name[@version] on the Hub.", metavar="RELEASE")
]


def only_output(out: Path | None, output: Path | None) -> Path:
    """Return the output path, which is an argument or an option. Raise InvalidInput unless there is exactly one."""
    if (path := out or output) is None or (out and output):
        found = "no directory for the result" if path is None else "two directories for the result"
        raise InvalidInput("--output", found=found, expected="one directory, as OUT or as --output OUT")
    return path


@contextmanager
def command_context(as_json: bool = False, *, with_state: bool = False) -> Iterator[Console]:
    """Yield the console of a command. If the block fails, end the command with one message and an exit code.

    An error caused by a user, a disk or the system has no traceback.

    Args:
        as_json: Whether standard output carries JSON.
        with_state: Whether to create the project's state directory and to point Prefect at it. Prefect reads its
            settings when it is imported, so commands import their flow inside the block.
    """
    with refusals(as_json):
        if with_state:
            from mergegate.flows.prefect_api import configure

            configure(Path(os.environ.setdefault("MERGEGATE_HOME", str(Path(".mergegate").absolute()))))
        from mergegate.flows.operations.console import FittingConsole

        yield FittingConsole(quiet=as_json, highlight=False)  # human-readable lines would break the JSON


@contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Turn errors caused by a user, a disk or the system into one message and an exit code."""
    try:
        try:
            yield
        except typer.Exit:  # the command has done its work, and ends with this exit code
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except MergegateError as error:
        raise _exit_with(error, as_json) from None
    except OSError as error:
        raise _exit_with(convert_os_error(error), as_json) from None
    except UnicodeEncodeError as error:
        # Python represents bytes that are not UTF-8 as lone surrogates, which cannot be encoded.
        text = ascii(error.object[max(0, error.start - 40) : error.end + 20])
        refusal = DiskUnavailable(
            text, found="a file name that is not valid text", expected="UTF-8", remedy="rename the file"
        )
        raise _exit_with(refusal, as_json) from None
    except (KeyboardInterrupt, typer.Abort):  # typer.Abort comes from a prompt
        _print_message("interrupted", f"interrupted; to resume, run: {command_line.get()}", as_json)
        raise typer.Exit(EXIT_CODES["interrupted"]) from None


def print_refusal(error: MergegateError, as_json: bool) -> None:
    """Print the message of an error, as text or as a JSON object."""
    _print_message(error.status, str(error), as_json, *findings_of(error))


def _exit_with(error: MergegateError, as_json: bool) -> typer.Exit:
    print_refusal(error, as_json)
    return typer.Exit(error.exit_code)


def _print_message(status: Status, message: str, as_json: bool, *findings: Finding) -> None:
    """Print the message, and ignore it if the output cannot be written, for example on a full disk."""
    from rich.text import Text

    from mergegate.flows.operations.console import FittingConsole, print_answer

    try:
        if as_json:
            print_answer(status, message, {}, findings)
            sys.stdout.flush()
            return
    except OSError:
        pass
    with suppress(OSError):
        FittingConsole(stderr=True, highlight=False).print(Text(message))
        sys.stderr.flush()
