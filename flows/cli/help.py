"""Format help texts: arguments by name in capitals (``mergegate run PROFILE``), commands as full sentences."""

from __future__ import annotations

from typing import Any

import typer.core
import typer.main


class FirstIsProfile(typer.core.TyperGroup):
    """A command group in which ``serve`` may be omitted: ``mergegate shadow PROFILE``."""

    unnamed = "serve"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names, or else the default command with that word as argument."""
        return super().resolve_command(ctx, args if args[0] in self.commands else [self.unnamed, *args])


def command_line(app: typer.Typer) -> Any:
    """Return the command that ``app`` declares, with all its subcommands. Call it to run it."""
    command = typer.main.get_command(app)
    _prepare(command)
    return command


def _prepare(command: Any) -> None:
    for parameter in command.params:
        if parameter.param_type_name == "argument" and parameter.metavar is None:
            parameter.metavar = (parameter.name or "").upper()
    for below in getattr(command, "commands", {}).values():
        # By default, the list of commands truncates sentences.
        below.short_help = below.short_help or f"{below.help.partition('. ')[0].rstrip('.')}."
        _prepare(below)
