"""List the commands of ``mergegate``, and run one.

Each command is a function in a file next to this one. The file is imported only when the command runs or its help is
shown, so that ``mergegate --help`` answers immediately.
"""

from __future__ import annotations

import gc
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer
import typer.core

from mergegate.flows.cli.command import command_line, convert_os_error, print_refusal, refusals
from mergegate.flows.cli.streams import safe_streams
from mergegate.merge_core.system import require_posix


class Entry(NamedTuple):
    """A command in the help: the file of its function, its summary, and commands that a user can copy.

    The function of ``store ls`` is ``store_ls_command``. The summary is the first line of its docstring.
    """

    file: str
    summary: str
    examples: tuple[str, ...]


_STORE = {
    "ls": Entry("store", "List every artifact and the reason to keep it.", ("mergegate store ls",)),
    "du": Entry("store", "Show the size of the store by stage.", ("mergegate store du",)),
    "verify": Entry(
        "store", "Compare every file of the store with its recorded hash.", ("mergegate store verify --json",)
    ),
    "gc": Entry(
        "store",
        "Remove artifacts that nothing needs.",
        ("mergegate store gc --dry-run", "mergegate store gc --quota 50GB --older-than 7"),
    ),
}
_SHADOW = {
    "serve": Entry(
        "shadow",
        "Run the proxy in front of the parent and the candidate.",
        ("mergegate shadow serve profiles/demo-shadow.yaml", "mergegate shadow profiles/demo-shadow.yaml --reset"),
    ),
    "replay": Entry(
        "shadow",
        "Send the requests of a file to the proxy, as users would.",
        ("mergegate shadow replay profiles/demo/traffic.jsonl --rate 20",),
    ),
    "evaluate": Entry(
        "shadow_decisions",
        "Judge new pairs, then promote, roll back or wait.",
        ("mergegate shadow evaluate profiles/demo-shadow.yaml --approve",),
    ),
    "status": Entry(
        "shadow_decisions",
        "Show which model serves users, and the evidence so far.",
        ("mergegate shadow status profiles/demo-shadow.yaml",),
    ),
    "promote": Entry(
        "shadow_decisions",
        "Promote the candidate, regardless of the evidence.",
        ('mergegate shadow promote profiles/demo-shadow.yaml --reason "hotfix"',),
    ),
    "rollback": Entry(
        "shadow_decisions",
        "Return all users to the parent, regardless of evidence.",
        ('mergegate shadow rollback profiles/demo-shadow.yaml --reason "complaints"',),
    ),
}
_PANELS: Mapping[str, Mapping[str, Entry]] = {
    "Release": {
        "run": Entry(
            "run",
            "Check, merge, evaluate, gate and publish a release.",
            (
                "mergegate run profiles/demo.yaml",
                "mergegate run profiles/demo.yaml --dry-run",
                "mergegate run profiles/demo.yaml --set evaluate.documents=200 --no-publish",
            ),
        ),
        "check": Entry(
            "check",
            "Find every problem before any weight is read.",
            ("mergegate check profiles/demo.yaml", "mergegate check profiles/demo/recipes/ties.yaml -v"),
        ),
        "init": Entry(
            "init",
            "Write a recipe and a profile for your models.",
            (
                "mergegate init models/base models/math models/code",
                'mergegate init acme/base acme/math --task "gsm8k:best parent" --out release',
                "mergegate init runs/pretrain --out profiles",
            ),
        ),
        "demo": Entry(
            "demo", "Release a merge of the demo models in a new directory.", ("mergegate demo mergegate-demo",)
        ),
    },
    "Merge": {
        "merge": Entry(
            "merge",
            "Merge a recipe into a directory, without evaluation.",
            (
                "mergegate merge profiles/demo/recipes/ties.yaml out/merge",
                "mergegate merge recipe.yaml out/merge --device cuda --seed 7",
            ),
        ),
        "plan": Entry(
            "plan",
            "Forecast memory, disk, time and cost of a merge.",
            ("mergegate plan profiles/demo.yaml", "mergegate plan recipe.yaml --price my-box=1.20"),
        ),
        "methods": Entry("methods", "List the merge methods and their parameters.", ("mergegate methods",)),
        "families": Entry("families", "Show which merges of a family of models work.", ("mergegate families qwen3",)),
        "extract-lora": Entry(
            "extract",
            "Extract a LoRA adapter from a fine-tune and its base.",
            ("mergegate extract-lora models/math models/base --rank 32 --out math-adapter",),
        ),
        "transplant-tokenizer": Entry(
            "transplant",
            "Give a model the tokenizer of another model.",
            ("mergegate transplant-tokenizer models/math models/donor out/math",),
        ),
    },
    "Evaluate": {
        "compare": Entry(
            "run",
            "Judge one checkpoint against another by a profile's guards.",
            ("mergegate compare models/old models/new --profile profiles/demo.yaml",),
        ),
        "gate": Entry(
            "gate",
            "Judge results of lm-eval or inspect_ai by guards.",
            ("mergegate gate merge=out/merge reference=out/parent -p profiles/demo.yaml",),
        ),
        "sweep": Entry(
            "sweep",
            "Search a recipe or a soup, and release the winner.",
            ("mergegate sweep profiles/demo-sweep.yaml", "mergegate sweep profiles/demo-soup.yaml --no-release"),
        ),
        "tune": Entry(
            "sweep",
            "Find the best scale of a merge, without labels.",
            ("mergegate tune profiles/demo.yaml", "mergegate tune profiles/demo.yaml --trials 8 --release"),
        ),
        "smoke": Entry(
            "smoke",
            "Serve a checkpoint, and test its answers.",
            (
                "mergegate smoke out/merge --profile profiles/demo-served.yaml",
                "mergegate smoke http://127.0.0.1:8000 --checkpoint out/merge",
            ),
        ),
        "fetch-data": Entry(
            "fetch_data",
            "Fetch the datasets of a profile's tasks for offline runs.",
            ("mergegate fetch-data profiles/examples/llama.yaml",),
        ),
    },
    "Inspect": {
        "status": Entry("status", "Show active runs, schedules, last results and the store.", ("mergegate status",)),
        "history": Entry(
            "history",
            "List how the runs of this project ended, newest first.",
            ("mergegate history", "mergegate history demo --last 5"),
        ),
        "explain": Entry(
            "status",
            "Explain the decision of a past run.",
            ("mergegate explain demo", "mergegate explain 7d50f2b56668"),
        ),
        "open": Entry(
            "status", "Open a report in a browser, or print its path.", ("mergegate open", "mergegate open demo")
        ),
        "verify": Entry(
            "verify",
            "Verify a release against its own claims.",
            (
                "mergegate verify releases/demo/latest",
                "mergegate verify releases/demo/latest --verdict",
                "mergegate verify acme/model@7d50f2b56668 --key public.pem",
            ),
        ),
        "reproduce": Entry(
            "verify",
            "Rebuild the weights of a release, and compare every byte.",
            ("mergegate reproduce releases/demo/latest",),
        ),
        "export": Entry(
            "export",
            "Export the results of a release to another tool.",
            (
                "mergegate export releases/demo/latest --output logs",
                "mergegate export acme/model --output logs --organization 'Acme Labs'",
            ),
        ),
        "fingerprint": Entry(
            "fingerprint",
            "Write the fingerprint of a known model to an index.",
            (
                "mergegate fingerprint models/base --name acme/base",
                "mergegate fingerprint acme/model --license cc-by-nc-4.0 --index known.jsonl",
            ),
        ),
        "schema": Entry(
            "schema",
            "Print the JSON Schema of a profile or a recipe.",
            ("mergegate schema profile > profile.json", "mergegate schema recipe > recipe.json"),
        ),
    },
    "Operate": {
        "server": Entry(
            "server",
            "Serve Prefect's API and pages for this project.",
            ("mergegate server", "mergegate server --port 4300"),
        ),
        "worker": Entry(
            "server", "Run due deployments, one at a time.", ("mergegate worker", "mergegate worker --once")
        ),
        "deploy": Entry("server", "Update deployments and schedules from schedules.yaml.", ("mergegate deploy",)),
        "trigger": Entry(
            "trigger",
            "Start a release on the next free worker.",
            ("mergegate trigger demo", "mergegate trigger profiles/demo.yaml --wait"),
        ),
        "approve": Entry(
            "approve",
            "Approve or reject a release that waits on the server.",
            ("mergegate approve demo", 'mergegate approve demo --reject --reason "wrong license"'),
        ),
        "doctor": Entry(
            "doctor",
            "Find damaged and leftover files of this project.",
            ("mergegate doctor", "mergegate doctor --repair"),
        ),
    },
    "Watch": {},
}
_OPTIONS: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}


# Type of an option → the word for its value in the help.
_METAVARS = {"Path": "PATH", "int": "NUMBER", "float": "NUMBER", "str": "TEXT"}


class Command(typer.core.TyperCommand):
    """A command whose help ends with examples.

    ``epilog`` has one example per line. ``rich_help_panel`` is the group of the command in ``mergegate --help``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, context = args, ctx
        while context.parent is not None:
            words, context = [context.info_name, *words], context.parent
        command_line.set(shlex.join(["mergegate", *words]))
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        examples = (self.epilog or "").splitlines()
        with formatter.section("Example" if len(examples) == 1 else "Examples"):
            for example in examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class LazyCommands(Mapping[str, Any]):
    """A mapping from names to commands. Looking up a command imports its file.

    ``panels`` has the commands of each group of the help. A panel without a title has the only group. ``subcommands``
    are the commands with commands of their own, by panel.
    """

    def __init__(
        self,
        panels: Mapping[str, Mapping[str, Entry]],
        subcommands: Mapping[str, Sequence[CommandGroup]],
        prefix: str = "",
    ) -> None:
        self._panels, self._subcommands, self._prefix = panels, subcommands, prefix

    def __getitem__(self, name: str) -> Any:
        for groups in self._subcommands.values():
            for group in groups:
                if group.name == name:
                    return group
        panel = next((panel for panel, entries in self._panels.items() if name in entries), None)
        if panel is None:
            raise KeyError(name)
        entry = self._panels[panel][name]
        with refusals(False):
            module = import_module(f"mergegate.flows.cli.{entry.file}")
        function = getattr(module, f"{self._prefix}{name.replace('-', '_')}_command")
        application = typer.Typer(add_completion=False, **_OPTIONS)
        declare = application.command(
            name,
            cls=Command,
            short_help=entry.summary,
            epilog="\n".join(entry.examples),
            rich_help_panel=panel or None,
        )
        declare(function)
        command: Any = typer.main.get_command(application)
        hints = get_type_hints(function)
        for parameter in command.params:
            if parameter.metavar is None:
                kinds = (word for kind, word in _METAVARS.items() if kind in str(hints[parameter.name]))
                is_argument = parameter.param_type_name == "argument"
                parameter.metavar = parameter.name.upper() if is_argument else next(kinds, None)
        return command

    def summaries(self) -> dict[str, list[tuple[str, str]]]:
        """Return the names and summaries of the commands of each panel, without importing the command files."""
        return {
            panel: [
                *((name, entry.summary) for name, entry in entries.items()),
                *((str(group.name), str(group.short_help)) for group in self._subcommands.get(panel, ())),
            ]
            for panel, entries in self._panels.items()
        }

    def __contains__(self, name: object) -> bool:
        return name in tuple(self)

    def __iter__(self) -> Iterator[str]:
        return (name for rows in self.summaries().values() for name, _ in rows)

    def __len__(self) -> int:
        return sum(map(len, self.summaries().values()))


class CommandGroup(typer.core.TyperGroup):
    """A group of commands whose files are imported only when needed."""

    default_command: str | None = None
    """Command to run if the first word is not the name of a command."""

    def __init__(self, *, commands: Any = None, default_command: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = commands or LazyCommands(_PANELS, _SUBCOMMANDS)
        self.default_command = default_command

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named by the first word, or the default command with that word as its first argument."""
        uses_default = self.default_command is not None and args[0] not in self.commands
        return super().resolve_command(ctx, [str(self.default_command), *args] if uses_default else args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel, rows in self.commands.summaries().items():
            with formatter.section(panel or "Commands"):
                formatter.write_dl(rows)


def _group(name: str, panel: str, table: Mapping[str, Entry], summary: str, **settings: Any) -> CommandGroup:
    return CommandGroup(
        commands=LazyCommands({"": table}, {}, prefix=f"{name}_"),
        name=name,
        help=summary,
        short_help=summary,
        no_args_is_help=True,
        rich_markup_mode=None,
        rich_help_panel=panel,
        **settings,
    )


_SUBCOMMANDS = {
    "Operate": [_group("store", "Operate", _STORE, "List, measure, verify and clean up the store.")],
    "Watch": [_group("shadow", "Watch", _SHADOW, "Test a release on users' traffic.", default_command="serve")],
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
