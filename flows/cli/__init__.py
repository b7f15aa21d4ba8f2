"""The command line: one file a command, what a person watches, and how it ends as an exit code."""

from mergegate.flows.cli.app import main

__all__ = ["main"]
