"""Questions on a terminal: an answer is checked when it is given, and asked for again until it can be used."""

from __future__ import annotations

from collections.abc import Callable

import typer

from mergegate.merge_core.errors import InvalidInput


def ask(question: str, default: str, check: Callable[[str], str]) -> str:
    """The answer, as ``check`` returns it.

    Args:
        default: What Enter alone means; empty: no answer, which ``check`` has to take.
        check: Raises InvalidInput for an answer that cannot be used; the person reads why, and is asked again.

    Raises:
        typer.Abort: for Ctrl-C, and where there is nobody any more.
    """

    def checked(text: str) -> str:
        try:
            return check(text.strip())
        except InvalidInput as error:
            raise typer.BadParameter("; wanted: ".join(filter(None, (error.found, error.expected)))) from None

    return str(typer.prompt(question, default=default, show_default=bool(default), value_proc=checked))
