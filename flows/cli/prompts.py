"""Prompt on a terminal. An answer is checked immediately, and the prompt is repeated until the answer is valid."""

from __future__ import annotations

from collections.abc import Callable

import typer

from mergegate.merge_core.errors import InvalidInput


def ask(question: str, default: str, check: Callable[[str], str]) -> str:
    """Return the answer, as ``check`` returns it.

    Args:
        question: Text of the prompt.
        default: Answer for Enter alone. If it is empty, ``check`` must accept an empty answer.
        check: Function that raises InvalidInput for an invalid answer. The user sees the reason and is prompted again.

    Raises:
        typer.Abort: The user pressed Ctrl-C, or standard input is closed.
    """

    def checked(text: str) -> str:
        try:
            return check(text.strip())
        except InvalidInput as error:
            raise typer.BadParameter("; wanted: ".join(filter(None, (error.found, error.expected)))) from None

    return str(typer.prompt(question, default=default, show_default=bool(default), value_proc=checked))
