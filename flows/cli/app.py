"""List the commands of ``mergegate``, and run one.

Each command is a function in a file next to this one. The file is imported only when the command runs or its help is
shown, so that ``mergegate --help`` answers immediately.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer
import typer.core

from mergegate.flows.cli.command import local_path, print_refusal, refusals
from mergegate.flows.cli.streams import safe_streams
from mergegate.flows.operations import command_line, convert_os_error
from mergegate.merge_core.system import require_posix

# The groups of the help. Each command has the file of its function, a summary, and examples that a user can copy. The
# function of ``store ls`` is ``store_ls_command``. The summary is the first line of its docstring.
_COMMANDS = """
Release
  run (run.py): Check, merge, evaluate, gate and publish a release.
    mergegate run profiles/demo.yaml
    mergegate run profiles/demo.yaml --dry-run
    mergegate run profiles/demo.yaml --set evaluate.documents=200 --no-publish
  check (check.py): Find every problem before any weight is read.
    mergegate check profiles/demo.yaml
    mergegate check profiles/demo/recipes/ties.yaml -v
  init (init.py): Write a recipe and a profile for your models.
    mergegate init models/base models/math models/code
    mergegate init acme/base acme/math --task "gsm8k:best parent" -o release
    mergegate init runs/pretrain -o profiles
  demo (run.py): Release a merge of the demo models in a new directory.
    mergegate demo mergegate-demo
Merge
  merge (merge.py): Merge a recipe into a directory, without evaluation.
    mergegate merge profiles/demo/recipes/ties.yaml out/merge
    mergegate merge recipe.yaml out/merge --device cuda --seed 7
  plan (merge.py): Forecast memory, disk, time and cost of a merge.
    mergegate plan profiles/demo.yaml
    mergegate plan recipe.yaml --price my-box=1.20
  methods (catalog.py): List the merge methods and their parameters.
    mergegate methods
  families (catalog.py): Show which merges of a family of models work.
    mergegate families qwen3
  extract-lora (merge.py): Extract a LoRA adapter from a fine-tune and its base.
    mergegate extract-lora models/math models/base --rank 32 -o math-adapter
  transplant-tokenizer (merge.py): Give a model the tokenizer of another model.
    mergegate transplant-tokenizer models/math models/donor out/math
Evaluate
  compare (run.py): Judge one checkpoint against another by a profile's guards.
    mergegate compare models/old models/new --profile profiles/demo.yaml
  gate (evaluate.py): Judge results of lm-eval or inspect_ai by guards.
    mergegate gate merge=out/merge reference=out/parent -p profiles/demo.yaml
  sweep (run.py): Search a recipe or a soup, and release the winner.
    mergegate sweep profiles/demo-sweep.yaml
    mergegate sweep profiles/demo-soup.yaml --no-release
  tune (run.py): Find the best scale of a merge, without labels.
    mergegate tune profiles/demo.yaml
    mergegate tune profiles/demo.yaml --trials 8 --release
  smoke (evaluate.py): Serve a checkpoint, and test its answers.
    mergegate smoke out/merge --profile profiles/demo-served.yaml
    mergegate smoke http://127.0.0.1:8000 --checkpoint out/merge
  fetch-data (evaluate.py): Fetch the datasets of a profile's tasks for offline runs.
    mergegate fetch-data profiles/examples/llama.yaml
Inspect
  status (server.py): Show active runs, schedules, last results and the store.
    mergegate status
  history (history.py): List how the runs of this project ended, newest first.
    mergegate history
    mergegate history demo --last 5
  explain (history.py): Explain the decision of a past run.
    mergegate explain demo
    mergegate explain 7d50f2b56668
  open (history.py): Open a report in a browser, or print its path.
    mergegate open
    mergegate open demo
  verify (releases.py): Verify a release against its own claims.
    mergegate verify releases/demo/latest
    mergegate verify releases/demo/latest --verdict
    mergegate verify acme/model@7d50f2b56668 --key public.pem
  reproduce (releases.py): Rebuild the weights of a release, and compare every byte.
    mergegate reproduce releases/demo/latest
  export (releases.py): Export the results of a release to another tool.
    mergegate export releases/demo/latest --output logs
    mergegate export acme/model --output logs --organization 'Acme Labs'
  fingerprint (merge.py): Write the fingerprint of a known model to an index.
    mergegate fingerprint models/base --name acme/base
    mergegate fingerprint acme/model --license cc-by-nc-4.0 --index known.jsonl
  schema (catalog.py): Print the JSON Schema of a profile or a recipe.
    mergegate schema profile > profile.json
    mergegate schema recipe > recipe.json
Operate
  server (server.py): Serve Prefect's API and pages for this project.
    mergegate server
    mergegate server --port 4300
  worker (server.py): Run due deployments, one at a time.
    mergegate worker
    mergegate worker --once
  deploy (server.py): Update deployments and schedules from schedules.yaml.
    mergegate deploy
  trigger (server.py): Start a release on the next free worker.
    mergegate trigger demo
    mergegate trigger profiles/demo.yaml --wait
  approve (server.py): Approve or reject a release that waits on the server.
    mergegate approve demo
    mergegate approve demo --reject --reason "wrong license"
  doctor (store.py): Find damaged and leftover files of this project.
    mergegate doctor
    mergegate doctor --repair
  store: List, measure, verify and clean up the store.
  store ls (store.py): List every artifact and the reason to keep it.
    mergegate store ls
  store du (store.py): Show the size of the store by stage.
    mergegate store du
  store verify (store.py): Compare every file of the store with its recorded hash.
    mergegate store verify --json
  store gc (store.py): Remove artifacts that nothing needs.
    mergegate store gc --dry-run
    mergegate store gc --quota 50GB --older-than 7
Watch
  shadow: Test a release on users' traffic.
  shadow serve (shadow.py): Run the proxy in front of the parent and the candidate.
    mergegate shadow serve profiles/demo-shadow.yaml
    mergegate shadow profiles/demo-shadow.yaml --reset
  shadow replay (shadow.py): Send the requests of a file to the proxy, as users would.
    mergegate shadow replay profiles/demo/traffic.jsonl --rate 20
  shadow evaluate (shadow.py): Judge new pairs, then promote, roll back or wait.
    mergegate shadow evaluate profiles/demo-shadow.yaml --approve
  shadow status (shadow.py): Show which model serves users, and the evidence so far.
    mergegate shadow status profiles/demo-shadow.yaml
  shadow promote (shadow.py): Promote the candidate, regardless of the evidence.
    mergegate shadow promote profiles/demo-shadow.yaml --reason "hotfix"
  shadow rollback (shadow.py): Return all users to the parent, regardless of evidence.
    mergegate shadow rollback profiles/demo-shadow.yaml --reason "complaints"
"""
_DEFAULT_COMMANDS = {"shadow": "serve"}  # command to run if the first word is not the name of a command
_OPTIONS: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}
# The meanings of ``merge_core.errors.EXIT_CODES``.
_EXIT_CODES = [
    ("0", "The command did what you wanted, or there was nothing to do."),
    ("1", "An unexpected error."),
    ("2", "Your input is wrong or missing."),
    ("3", "A check, the gate or this machine refuses valid input."),
    ("130", "You pressed Ctrl-C. Run the command again, and it resumes."),
]
_DOCUMENTATION = "docs/index.md in the repository, and mergegate COMMAND --help."
_METAVARS = {"Path": "PATH", "int": "NUMBER", "float": "NUMBER", "str": "TEXT"}  # by type of an option


class Entry(NamedTuple):
    """A command in the help. A group of commands has no file and no examples."""

    panel: str
    file: str
    summary: str
    examples: list[str]


def _entries() -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    panel, name = "", ""
    for line in _COMMANDS.strip().splitlines():
        if command := re.fullmatch(r"  (\S[^(:]*?)(?: \((\w+)\.py\))?: (.*)", line):
            name, file, summary = command.groups()
            entries[name] = Entry(panel, file or "", summary, [])
        elif line.startswith(" "):
            entries[name].examples.append(line.strip())
        else:
            panel = line
    return entries


class Command(typer.core.TyperCommand):
    """A command whose help ends with examples.

    ``epilog`` has one example per line. ``rich_help_panel`` is the group of the command in ``mergegate --help``, and
    that of an option is the section of the command's help.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, context = args, ctx
        while context.parent is not None:
            words, context = [context.info_name, *words], context.parent
        command_line.set(shlex.join(["mergegate", *words]))
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after the name: an argument in brackets may be left out, and ... may be repeated."""
        pieces = []
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
                pieces.append(f"{name}{'' if parameter.nargs == 1 else '...'}")
        return [*pieces, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Advanced": []}
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            name, text = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            section = "Arguments" if is_argument else parameter.rich_help_panel or "Options"
            sections[section].append((parameter.metavar if is_argument else name, plain_default(text)))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        examples = (self.epilog or "").splitlines()
        with formatter.section("Example" if len(examples) == 1 else "Examples"):
            for example in examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def plain_default(text: str) -> str:
    """Remove the parentheses that typer writes around a default in words."""
    return re.sub(r"\[default: \((.*)\)(?=[];])", r"[default: \1", text)


class LazyCommands(Mapping[str, Any]):
    """A mapping from names to commands. Looking up a command imports its file.

    ``prefix`` is the name of a group and a space, for the commands of that group.
    """

    def __init__(self, prefix: str = "") -> None:
        entries = {name.removeprefix(prefix): entry for name, entry in _entries().items() if name.startswith(prefix)}
        self._entries = {name: entry for name, entry in entries.items() if " " not in name}
        self._prefix = prefix

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        settings: dict[str, Any] = {"short_help": entry.summary, "rich_help_panel": entry.panel}
        if not entry.file:
            return CommandGroup(
                f"{name} ", name=name, help=entry.summary, no_args_is_help=True, rich_markup_mode=None, **settings
            )
        with refusals(False):
            module = import_module(f"mergegate.flows.cli.{entry.file}")
        function = getattr(module, f"{self._prefix}{name}_command".replace("-", "_").replace(" ", "_"))
        function.__annotations__ = hints = get_type_hints(function, include_extras=True)
        for hint in hints.values():
            if "Path" in str(hint):
                hint.__metadata__[0].parser = local_path
        application = typer.Typer(add_completion=False, **_OPTIONS)
        application.command(name, cls=Command, epilog="\n".join(entry.examples), **settings)(function)
        command: Any = typer.main.get_command(application)
        for parameter in command.params:
            if parameter.metavar is None:
                kinds = (word for kind, word in _METAVARS.items() if kind in str(hints[parameter.name].__origin__))
                is_argument = parameter.param_type_name == "argument"
                choices = "|".join(parameter.type_descriptor.choices or ())
                parameter.metavar = choices or (parameter.name.upper() if is_argument else next(kinds, None))
        return command

    def summaries(self) -> dict[str, list[tuple[str, str]]]:
        """Return the names and summaries of the commands of each panel, without importing the command files."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, entry in self._entries.items():
            panels.setdefault("Commands" if self._prefix else entry.panel, []).append((name, entry.summary))
        return panels

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


class CommandGroup(typer.core.TyperGroup):
    """A group of commands whose files are imported only when needed. ``prefix`` is as in ``LazyCommands``."""

    def __init__(self, prefix: str = "", *, commands: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LazyCommands(prefix)
        self.default_command = _DEFAULT_COMMANDS.get(str(self.name))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named by the first word, or the default command with that word as its first argument."""
        uses_default = self.default_command is not None and args[0] not in self.commands
        return super().resolve_command(ctx, [str(self.default_command), *args] if uses_default else args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel, rows in self.commands.summaries().items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if ctx.parent is None:
            with formatter.section("Start with"):
                formatter.write_text("mergegate demo")
            with formatter.section("Exit codes"):
                formatter.write_dl(_EXIT_CODES)
            with formatter.section("Documentation"):
                formatter.write_text(_DOCUMENTATION)


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
