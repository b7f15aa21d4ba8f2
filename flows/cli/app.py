"""List the commands of ``mergegate``, and run one.

Each command is a function in a file next to this one. The file is imported only when the command runs or its help is
shown, so that ``mergegate --help`` answers immediately.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import takewhile
from typing import Annotated, Any

import typer
import typer.core

from mergegate.flows.cli.command import convert_os_error, print_refusal, refusals
from mergegate.flows.cli.streams import safe_streams
from mergegate.merge_core.system import require_posix

# Command → its file and its summary in the list of commands. The function of `store ls` is `store_ls_command`.
# A test compares the summaries with the docstrings.
_STORE = {
    "ls": ("store", "List every artifact with its stage, model, size, age and reason to keep it."),
    "du": ("store", "Show the size of the store by stage, and how much of it is needed."),
    "verify": ("store", "Read every file of the store and compare it with its recorded hash."),
    "gc": ("store", "Remove artifacts that no run, no release and no recent run of a profile needs."),
}
_SHADOW = {
    "serve": ("shadow", "Run the proxy in front of the parent and the candidate."),
    "replay": ("shadow", "Send the requests of a file to the proxy, as users would."),
    "evaluate": ("shadow_decisions", "Judge new pairs, then promote the candidate, roll it back, or wait."),
    "status": ("shadow_decisions", "Show which model serves users, and the evidence so far."),
    "promote": ("shadow_decisions", "Promote the candidate manually, independent of the evidence."),
    "rollback": ("shadow_decisions", "Route all users back to the parent, independent of the evidence."),
}
_COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("run", "Check, merge, evaluate, gate and publish a release."),
    "demo": ("demo", "Copy the demo models into a directory, and release a merge of them there."),
    "check": ("check", "Find every problem before any weight is read, and list all findings, worst first."),
    "plan": ("plan", "Forecast bytes, memory, disk, time and cost of a merge from headers alone."),
    "merge": ("merge", "Merge a recipe into a directory, without evaluation."),
    "compare": ("run", "Judge checkpoint B against checkpoint A with the evidence and guards of a profile."),
    "gate": ("gate", "Judge the output of lm-eval with the guards of a profile."),
    "sweep": ("sweep", "Search the free values of a recipe, confirm the winner, and release it."),
    "tune": ("sweep", "Find the scale at which a merge is most certain of its answers, without labels."),
    "init": ("init", "Write a recipe and a profile for your models that pass the checks."),
    "smoke": ("smoke", "Serve a checkpoint, send test requests, and print the results of all checks."),
    "methods": ("methods", "List the merge methods with their parameters, ranges and defaults."),
    "schema": ("schema", "Print the JSON Schema of a profile or a recipe, for editors."),
    "fetch-data": ("fetch_data", "Fetch the datasets of a profile's tasks for offline runs."),
    "extract-lora": ("extract", "Extract a LoRA adapter from a fine-tune and its base."),
    "transplant-tokenizer": ("transplant", "Give a model the tokenizer of another model."),
    "verify": ("verify", "Verify a release against its own claims."),
    "reproduce": ("verify", "Rebuild the weights of a release, and compare them byte by byte."),
    "history": ("history", "List how the runs of this project ended, newest first."),
    "status": ("status", "Show active runs, schedules, the last result of each profile and the store."),
    "open": ("status", "Open a report in a browser, or print its path."),
    "explain": ("status", "Explain the decision of a past run."),
    "doctor": ("doctor", "Find damaged, set-aside and leftover files of this project."),
    "server": ("server", "Serve Prefect's API and pages for this project."),
    "worker": ("server", "Run due deployments, one at a time, in this project's directory."),
    "deploy": ("server", "Update the server's deployments, schedules and notifications from schedules.yaml."),
    "trigger": ("trigger", "Start a release on the next free worker, and print the URL of its page."),
    "approve": ("approve", "Approve or reject a release that waits on the server."),
}
RENAMED_COMMANDS: Mapping[str, str] = {"look": "evaluate"}
"""Maps former names of commands to their present names. Using a former name is an error that states the present one."""
RENAMED_OPTIONS: Mapping[str, str] = {
    "--again": "--reset",
    "--at-once": "--concurrency",
    "--key-from": "--api-key-env",
    "--mend": "--repair",
    "--older": "--older-than",
    "--why": "--reason",
}
"""Maps former names of options to their present names. Using a former name is an error that states the present one."""
_OPTIONS: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}


class Command(typer.core.TyperCommand):
    """A command that rejects the former name of an option with an error that tells the user the present one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {option for parameter in self.params for option in parameter.opts}
        for word in takewhile(lambda word: word != "--", args):
            former = word.partition("=")[0]
            if (current := RENAMED_OPTIONS.get(former)) in options and former not in options:
                raise typer.BadParameter(f"this option was renamed: write {current}", ctx, param_hint=former)
        return super().parse_args(ctx, args)


class LazyCommands(Mapping[str, Any]):
    """A mapping from names to commands. Looking up a command imports its file."""

    def __init__(self, table: Mapping[str, tuple[str, str]], groups: Mapping[str, Any], prefix: str = "") -> None:
        self._table, self._groups, self._prefix = table, groups, prefix

    def __getitem__(self, name: str) -> Any:
        if name in self._groups:
            return self._groups[name]
        file, summary = self._table[name]
        with refusals(False):
            module = import_module(f"mergegate.flows.cli.{file}")
        function = getattr(module, f"{self._prefix}{name.replace('-', '_')}_command")
        application = typer.Typer(add_completion=False, **_OPTIONS)
        application.command(name, cls=Command, short_help=summary)(function)
        command: Any = typer.main.get_command(application)
        for parameter in command.params:
            if parameter.param_type_name == "argument" and parameter.metavar is None:
                parameter.metavar = (parameter.name or "").upper()
        return command

    def summaries(self) -> list[tuple[str, str]]:
        """Return the name and the summary of each command, without importing the command files."""
        groups = [(name, group.short_help) for name, group in self._groups.items()]
        return [*((name, summary) for name, (_, summary) in self._table.items()), *groups]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._table, *self._groups))

    def __len__(self) -> int:
        return len(self._table) + len(self._groups)


class CommandGroup(typer.core.TyperGroup):
    """A group of commands whose files are imported only when needed."""

    default_command: str | None = None
    """Command to run if the first word is not the name of a command."""

    def __init__(self, *, commands: Any = None, default_command: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = commands or LazyCommands(_COMMANDS, _GROUPS)
        self.default_command = default_command

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named by the first word, or the default command with that word as its first argument."""
        if (current := RENAMED_COMMANDS.get(args[0])) in self.commands and args[0] not in self.commands:
            raise typer.BadParameter(f"this command was renamed: write {current}", ctx, param_hint=args[0])
        uses_default = self.default_command is not None and args[0] not in self.commands
        return super().resolve_command(ctx, [str(self.default_command), *args] if uses_default else args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.commands.summaries())


def _group(name: str, table: Mapping[str, tuple[str, str]], summary: str, **settings: Any) -> CommandGroup:
    return CommandGroup(
        commands=LazyCommands(table, {}, prefix=f"{name}_"),
        name=name,
        help=summary,
        short_help=summary,
        no_args_is_help=True,
        rich_markup_mode=None,
        **settings,
    )


_GROUPS = {
    "store": _group("store", _STORE, "List, measure and verify the store, and remove unneeded artifacts."),
    "shadow": _group(
        "shadow", _SHADOW, "Test a release on users' traffic before it is promoted.", default_command="serve"
    ),
}

app = typer.Typer(
    name="mergegate",
    cls=CommandGroup,
    help="Merge models by a recipe, and release the result only if it passes the gate.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **_OPTIONS,
)


@app.callback(invoke_without_command=True)
def root_command(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Print the version, or continue with the command."""
    with refusals(False):
        require_posix(os.name)
    if version:
        from importlib.metadata import version as installed

        print(f"mergegate {installed('mergegate')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Run the ``mergegate`` command."""
    # A run creates a million objects for its tables of tensors within a second. Scanning them for cycles every 700
    # objects would double that time.
    gc.set_threshold(100_000, 20, 20)
    with safe_streams():
        try:
            typer.main.get_command(app)()
        except OSError as error:  # typer's own output, which no command writes: --help on a full disk
            refusal = convert_os_error(error)
            print_refusal(refusal, as_json=False)
            raise SystemExit(refusal.exit_code) from None
        finally:
            # The imports of a run create a million objects. One more scan for cycles would take seconds at exit.
            gc.freeze()
