"""Implement the command line: one file per command, progress on the terminal, and exit codes."""

from mergegate.flows.cli.app import main
