"""How help speaks: arguments by their names in capitals (``mergegate run PROFILE``), commands by whole sentences."""

from __future__ import annotations

from typing import Any

import typer.core
import typer.main


class FirstIsProfile(typer.core.TyperGroup):
    """Commands, of which ``serve`` may go without its name: ``mergegate shadow PROFILE``."""

    unnamed = "serve"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names; where it names none, the unnamed one, with that word."""
        return super().resolve_command(ctx, args if args[0] in self.commands else [self.unnamed, *args])


def command_line(app: typer.Typer) -> Any:
    """The command that ``app`` declares, with all those below it: call it to run it."""
    command = typer.main.get_command(app)
    _prepare(command)
    return command


def _prepare(command: Any) -> None:
    for parameter in command.params:
        if parameter.param_type_name == "argument" and parameter.metavar is None:
            parameter.metavar = (parameter.name or "").upper()
    for below in getattr(command, "commands", {}).values():
        # Left alone, the list of commands breaks off in the middle of each one's sentence.
        below.short_help = below.short_help or f"{below.help.partition('. ')[0].rstrip('.')}."
        _prepare(below)
