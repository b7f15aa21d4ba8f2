"""``mergegate init``: write a recipe and a profile for existing models that pass ``check``, or say what blocks them.

::

    mergegate init models/base models/math models/code                 # prompts for missing facts
    mergegate init acme/base acme/math acme/code --yes -o nightly   # no prompts

mergegate derives the method and its values from headers and tokenizers, the tasks from the claims of the model cards,
and the license section from the declared licenses. It checks the headers before it writes any file, and never
overwrites one. It prints open decisions, and writes them to the files as comments.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.text import Text

from mergegate.flows.candidates import names_training_run
from mergegate.flows.cli.catalog import schema_text
from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.drafts import (
    SCHEMA_LINE,
    GuardDraft,
    LicenseDraft,
    ProfileDraft,
    RecipeDraft,
    claimed_tasks,
    fitting_recipe,
    profile_text,
)
from mergegate.flows.operations.console import print_answer
from mergegate.flows.preflight import Problems, preflight_profile
from mergegate.flows.profile import is_release_name, parse_profile
from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind
from mergegate.merge_core.errors import InvalidInput, MergegateError, escape_invisible, suggest
from mergegate.merge_core.files import state_directory, write_state
from mergegate.merge_core.recipe import expand_user_path
from mergegate.tasks.base.stage import home, store
from mergegate.tasks.models.checkpoints import ResolvedCheckpoint, find_checkpoint, read_card
from mergegate.tasks.preflight import SAMPLE, describe_judging, sample_queries
from mergegate.tasks.preflight.licenses import LicenseSettings, check_licenses, license_table, read_licenses
from mergegate.tasks.quality.evaluation import AnyBuiltInTask, pin_built_in, pin_data, pin_task, task_tree
from mergegate.tasks.quality.gate import LAST_CHECKPOINT
from mergegate.tasks.quality.perplexity import PerplexitySettings, pin_documents

# Names of held-out texts to look for in the working directory, the new directory and the models' directories.
_OUR_SAMPLE, _SAMPLE_FILE = "sample", "held-out.sample.txt"
_SAMPLE_QUERIES = "queries.sample.jsonl"
_TEXTS = ("held-out.jsonl", "held-out.txt", "data/held-out.jsonl", "data/held-out.txt")
# Uses of the merge, the most demanding one first.
_USES = (("commercial", "public"), ("commercial", "private"), ("research", "public"), ("research", "private"))


def init_command(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE", help="Model that the others were fine-tuned from. Without MODEL, a training run."
        ),
    ],
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Directories, org/name@rev, or adapters.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the recipe and the profile.")] = Path(),
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the release.", show_default="the models' names")
    ] = "",
    method: Annotated[
        str, typer.Option(metavar="NAME", help="Merge method.", show_default="chosen by the headers")
    ] = "",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Held-out text for the perplexity check: JSON Lines with 'text', or plain text.",
            show_default="a file next to the models, or a sample",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:GUARD]",
            help="Task that the merge must not lose: its name in lm-eval, or a file. GUARD is the model to compare "
            "with. Repeatable.",
            show_default="the benchmarks that the model cards name",
        ),
    ] = None,
    accept: Annotated[
        str, typer.Option(metavar="'NAME: REASON'", help="Accept unclear licenses, with your name and the reason.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Use the defaults, without prompts.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a recipe and a profile for your models.

    The files pass mergegate check, or the command prints what blocks a run, such as an unknown license, and exits with
    the code of check. mergegate never overwrites files, and prompts for missing facts on a terminal.
    """
    with command_context(as_json, with_state=True) as console:
        prompts = not (as_json or yes) and sys.stdin.isatty() and sys.stdout.isatty()
        request = InitRequest(base, tuple(models or ()), output, name, method, data, tuple(task or ()), accept, prompts)
        raise typer.Exit(init_project(request, console, as_json))


@dataclass(frozen=True)
class InitRequest:
    """Arguments of ``mergegate init``. An empty value means that the user did not specify it.

    Without ``models``, ``base`` is a training run.
    """

    base: str
    models: tuple[str, ...]
    out: Path
    name: str = ""
    method: str = ""
    data: Path | None = None
    tasks: tuple[str, ...] = ()  # NAME or NAME:GUARD
    accept: str = ""  # name: reason
    prompts: bool = False  # whether to prompt for missing values


def init_project(request: InitRequest, console: Console, as_json: bool) -> int:
    """Write a recipe and a profile, print all decisions, and return the exit code of the checks on the new profile.

    Raises:
        InvalidInput: A model does not exist, no recipe fits, or a file exists.
        Refused: A repository denies access, or the Hub is not available.
    """
    is_run = not request.models
    if is_run and not names_training_run(request.base):
        raise InvalidInput(
            "mergegate init",
            found=f"no models after {request.base}",
            expected="the base and the models to merge, or the directory of a training run",
        )
    models = []
    for text in () if is_run else (request.base, *request.models):  # a directory with an adapter is applied to the base
        path = expand_user_path(text)
        is_adapter = (path / "adapter_config.json").is_file() and not (path / "config.json").is_file()
        models.append(find_checkpoint(f"{request.base}+{text}" if is_adapter else text))
    out = request.out.absolute()  # relative paths are resolved before files are written

    def files_of(name: str) -> tuple[Path, Path]:
        return out / f"{name}.recipe.yaml", out / f"{name}.yaml"

    def unused_name(name: str) -> str:
        if not is_release_name(name):
            raise InvalidInput("--name", found=f"{name!r}", expected="letters, digits, '.', '_' and '-'")
        require_new(files_of(name))
        return name

    with directory_for_new_files(out):
        named = request.models[:3] or (request.base.partition("/*")[0],)
        stems = (Path(model.partition("@")[0]).name for model in named)
        parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") for stem in stems]
        default_name = "-".join(filter(None, parts)) or "merge"
        name = _answer(request, "name of the release", request.name, default_name, unused_name)
        files = files_of(name)
        draft, parents, kind, thinking, summary = fitting_recipe(request.method, models or request.base, out, name)
        console.print(Text(f"recipe   {summary}", style="bold"))
        console.print(f"         {draft.why}".replace("\n# ", "\n         "))
        license = _license(request, parents, name, out)
        if is_run:
            licenses = ", ".join(dict.fromkeys(license.declared.values()))
            license = replace(license, declared={f"{len(parents)} checkpoints": licenses})
        console.print(Text(f"license  {license.purpose}, {license.visibility}", style="bold"))
        if kind.name != TEXT_GENERATOR.name:
            console.print(Text(f"kind     {kind.noun}, {describe_judging(kind)}", style="bold"))
        if request.data is not None and not kind.is_causal:
            raise InvalidInput(
                f"--data {request.data}",
                found=f"held-out text for a perplexity, but the merge is {kind.noun}",
                expected="no held-out text",
                remedy="remove --data",
            )
        documents, is_sample = _documents(request, models, out) if kind.is_causal else ("", False)
        if thinking:
            end = thinking.template.end or "unknown: set think_end_token in the profile"
            console.print(Text(f"thinking {thinking.name}: its thoughts end with {end}", style="bold"))
        profile = ProfileDraft(
            name=name,
            recipe=files[0].name,
            license=license,
            documents=documents,
            is_sample=is_sample,
            guards=tuple(
                replace(guard, prompt_settings=thinking.prompt_settings(task_tree(guard.task, out).generates_answers))
                if thinking and isinstance(guard.task, str)
                else guard
                for guard in _guards(request, parents, kind, out, console)
            ),
            thinking=thinking,
            release=f"releases/{name}",
            schema="",
            kind=kind,
        )
        return _write_project(draft, profile, files, console, as_json)


def _write_project(
    draft: RecipeDraft, profile: ProfileDraft, files: Sequence[Path], console: Console, as_json: bool
) -> int:
    """Write the schemas, the sample text, the recipe and the profile, then check the profile."""
    out = files[0].parent
    directory = home() / "schema"
    schemas = {}
    for kind in ("profile", "recipe"):
        write_state(state_directory(directory) / f"{kind}.json", schema_text(kind).encode())
        schemas[kind] = Path(os.path.relpath(directory / f"{kind}.json", out)).as_posix()
    sample = "".join(f"{line}\n\n" for line in SAMPLE if line.strip())
    parameters = "# weight: factor of a model's difference; density: share of the difference that is kept.\n"
    if "run" in draft.recipe:
        parameters = ""
    write_new_files(
        {
            **({out / profile.documents: sample} if profile.is_sample else {}),
            **({out / _SAMPLE_QUERIES: sample_queries()} if _has_sample_queries(profile) else {}),
            files[0]: SCHEMA_LINE.format(schemas["recipe"])
            + "# The merge, in mergekit's dialect. 'mergegate methods' lists all values of merge_method.\n"
            + f"# {draft.why}\n"
            + parameters
            + yaml.safe_dump(dict(draft.recipe), sort_keys=False, allow_unicode=True),
            files[1]: profile_text(replace(profile, schema=schemas["profile"])),
        }
    )

    problems = Problems(stop_at_once=False)
    data = {"root": out, **yaml.safe_load(files[1].read_text(encoding="utf-8"))}
    preflight_profile(parse_profile(data, str(files[1])), problems)
    blocking = [finding for finding in problems.worst_first() if finding.severity == "block"]
    written = [str(file) for file in files]
    left_out = [guard.problem for guard in profile.guards if guard.problem]
    if len(left_out) == len(profile.guards):
        advice = " Add --task NAME, or tasks under 'evaluate' in the profile." if profile.kind.task_forms else ""
        left_out.append(f"no tasks: {profile.without_tasks}{advice}")
    if as_json:
        more = {"files": written, "doubts": [*profile.license.doubts, *left_out]}
        status = "refused" if blocking else "written"
        print_answer(status, f"wrote {', '.join(written)}", more, problems.worst_first())
        return problems.exit_code
    for doubt in (*profile.license.doubts, *left_out):
        console.print(Text(f"!        {doubt}", style="yellow"))
    for written_file in written:
        console.print(Text(f"wrote    {os.path.relpath(written_file)}"))
    if profile.is_sample:
        console.print(Text("         the held-out text is mergegate's sample; use your own with --data FILE", "yellow"))
    if _has_sample_queries(profile):
        note = "         the queries are mergegate's sample; use your own with --task FILE.jsonl"
        console.print(Text(note, style="yellow"))
    for finding in blocking:
        console.print(Text(f"✗ {finding}", style="bold red"))
        if finding.remedy:
            console.print(f"    remedy:   {finding.remedy}")
    step = "check" if blocking else "run"
    console.print(Text(f"next     mergegate {step} {os.path.relpath(files[1])}", style="bold"))
    return problems.exit_code


def _answer(request: InitRequest, question: str, option: str, default: str, check: Callable[[str], str]) -> str:
    """Return the value of an option, or else the user's answer to ``question``. ``check`` validates and converts it."""
    return check(option or default) if option or not request.prompts else prompt(question, default, check)


def _license(request: InitRequest, parents: Sequence[ResolvedCheckpoint], name: str, out: Path) -> LicenseDraft:
    """Return the most demanding use that the licenses allow, or else a use that a user can approve."""
    table = license_table(LicenseSettings(), out)
    declared = read_licenses(parents, table)
    verdicts = {}
    for purpose, visibility in _USES:
        settings = LicenseSettings.model_validate({"purpose": purpose, "visibility": visibility})
        verdicts[purpose, visibility] = check_licenses.build(declared, settings.use(name), table, {}).value
    rank = {"allowed": 0, "review": 1, "blocked": 2}
    purpose, visibility = min(_USES, key=lambda use: rank[verdicts[use].combination.status])
    verdict = verdicts[purpose, visibility]
    reasons = [reason for reason in verdict.combination.reasons if reason.status != "allowed"]
    subjects = list(dict.fromkeys(subject.license or subject.model for reason in reasons for subject in reason.about))

    def acceptance(text: str) -> str:
        try:
            LicenseSettings(accepted={"a doubt": text} if text else {})
        except ValidationError:
            expected = "'name: reason'"
            raise InvalidInput("--accept", found=f"{text!r}", expected=expected) from None
        return text

    accept = ""
    if subjects and (request.prompts or request.accept):
        if not request.accept:
            for reason in reasons:
                typer.echo(escape_invisible(f"license: {reason.sentence}"))
        question = "accept these license gaps? Enter 'name: reason', or leave blank"
        accept = _answer(request, question, request.accept, "", acceptance)
    return LicenseDraft(
        purpose=purpose,
        visibility=visibility,
        declared=verdict.licenses,
        doubts=tuple(reason.sentence for reason in reasons),
        accepted=dict.fromkeys(subjects, accept) if accept else None,
    )


def _documents(request: InitRequest, models: Sequence[ResolvedCheckpoint], out: Path) -> tuple[str, bool]:
    """Return the path of the held-out text relative to the profile, and whether it is mergegate's own sample."""
    model_directories = [model.directory.parent for model in models if model.revision is None]
    directories = dict.fromkeys(
        [Path.cwd(), out, *model_directories, *(directory.parent for directory in model_directories)]
    )
    existing = next(
        (directory / text for directory in directories for text in _TEXTS if (directory / text).is_file()), None
    )

    def readable(text: str) -> str:
        if text == _OUR_SAMPLE:
            require_new([out / _SAMPLE_FILE])
            return text
        pin_documents(PerplexitySettings(documents=Path(text).absolute()), out, store().hashes)
        return text

    question = f"held-out text (a file of JSON Lines or plain text, or '{_OUR_SAMPLE}' for a short sample)"
    option = "" if request.data is None else str(request.data)
    answer = _answer(request, question, option, os.path.relpath(existing) if existing else _OUR_SAMPLE, readable)
    if answer == _OUR_SAMPLE:
        return _SAMPLE_FILE, True
    return Path(os.path.relpath(Path(answer).absolute(), out)).as_posix(), False


def _has_sample_queries(profile: ProfileDraft) -> bool:
    """Return whether a guard of the profile uses mergegate's own queries."""
    return any(isinstance(guard.task, Mapping) and guard.task["data"] == _SAMPLE_QUERIES for guard in profile.guards)


def _guards(
    request: InitRequest, parents: Sequence[ResolvedCheckpoint], kind: ModelKind, out: Path, console: Console
) -> tuple[GuardDraft, ...]:
    """Return guards for the requested tasks, then for each task that a model card claims.

    An answer to the prompt replaces the claimed tasks that can run here. A model that text tasks cannot judge has
    guards for the requested files, or for a sample of queries.

    Raises:
        InvalidInput: A requested task or the model to compare with does not exist.
    """
    # The names of the checkpoints of a training run change with every new one.
    compared = {parent.name: parent for parent in parents} if request.models else {LAST_CHECKPOINT: parents[-1]}
    references = ("best parent", *compared) if request.models else tuple(compared)

    def parse_guard(text: str, why: str) -> GuardDraft:
        task, _, reference = (text, "", "") if Path(text).is_file() else text.partition(":")
        task, reference = task.strip(), reference.strip() or references[0]
        if reference not in references:
            raise InvalidInput(
                f"--task {text}",
                found=f"no model called {reference!r}",
                expected=f"one of {', '.join(references)}",
                remedy=suggest(reference, references),
            )
        name = Path(os.path.relpath(Path(task).absolute(), out)).as_posix() if Path(task).is_file() else task
        if not kind.reads_text:
            form = kind.task_forms[0] if kind.task_forms else ""
            if not form or not task.endswith(".jsonl"):
                raise InvalidInput(
                    f"--task {text}",
                    found=f"a text task, but the merge is {kind.noun}, {describe_judging(kind)}",
                    expected=f"a file with the documents of a {form} task: NAME.jsonl" if form else "no task",
                )
            built_in = TypeAdapter(AnyBuiltInTask).validate_python({"kind": form, "data": Path(name)})
            pin_built_in(built_in, out, store().hashes)
            return GuardDraft({"kind": form, "data": name}, reference, why)
        pin_task(name, out, store().hashes)
        return GuardDraft(name, reference, why)

    guards = [parse_guard(text, "requested with --task") for text in request.tasks]
    if not kind.reads_text:
        if not guards and "retrieval" in kind.task_forms:
            require_new([out / _SAMPLE_QUERIES])
            sample = {"kind": "retrieval", "data": _SAMPLE_QUERIES}
            guards.append(GuardDraft(sample, references[0], "mergegate's sample: replace it with queries of your own"))
        return tuple(guards)
    claimed: dict[str, GuardDraft] = {}
    for name, parent in compared.items():
        card = read_card(parent.adapter.directory if parent.adapter else parent.directory)
        for task in claimed_tasks(card.fields):
            if all(guard.task != task for guard in guards):  # requested tasks are checked with the profile
                claimed.setdefault(task, GuardDraft(task, name, f"the model card of {parent.name} mentions it"))
    for task, guard in claimed.items():
        console.print(Text(f"task     {task}: {guard.why}; checking whether its data is available", style="dim"))
        try:
            pin_data(pin_task(task, out, store().hashes))
        except MergegateError as error:
            first = str(error).partition("\n")[0]
            guard = replace(guard, problem=f"{task}: {first}")  # only mentioned in the profile
        guards.append(guard)
    if request.tasks or not request.prompts:
        return tuple(guards)
    runnable = {f"{guard.task}:{guard.guarded_by}": guard for guard in guards if not guard.problem}

    def split_tasks(text: str) -> list[str]:
        return [part for part in map(str.strip, text.split(",")) if part and part != "none"]

    def check_tasks(text: str) -> str:
        for part in split_tasks(text):
            try:
                parse_guard(part, "")
            except InvalidInput as error:  # an answer may name several tasks
                raise InvalidInput(part, found=f"{part}: {error.found}", expected=error.expected) from None
        return text

    question = "tasks that the merge must not lose (lm-eval's names or files, as NAME or NAME:MODEL, with commas)"
    chosen = split_tasks(prompt(question, ", ".join(runnable) or "none", check_tasks))
    return (
        *(runnable.get(part) or parse_guard(part, "chosen in mergegate init") for part in chosen),
        *(guard for guard in guards if guard.problem),
    )


def prompt(question: str, default: str, check: Callable[[str], str]) -> str:
    """Prompt on the terminal until ``check`` accepts the answer, and return the value that ``check`` returns.

    Args:
        question: Text of the prompt.
        default: Answer if the user only presses Enter. If it is empty, ``check`` must accept an empty answer.
        check: Function that converts an answer, or raises InvalidInput with the reason to show before prompting again.

    Raises:
        typer.Abort: The user pressed Ctrl-C, or standard input is closed.
    """

    def valid_answer(text: str) -> str:
        try:
            return check(text.strip())
        except InvalidInput as error:
            raise typer.BadParameter("; expected: ".join(filter(None, (error.found, error.expected)))) from None

    return str(typer.prompt(question, default=default, show_default=bool(default), value_proc=valid_answer))


def require_new(files: Iterable[Path]) -> None:
    """Raise InvalidInput, which names the first existing file, unless none of ``files`` exists."""
    if existing := next((file for file in files if os.path.lexists(file)), None):
        raise InvalidInput(
            str(existing), found="it exists", expected="a new file", remedy="choose another --name or --output"
        )


def write_new_files(texts: Mapping[Path, str]) -> None:
    """Write each text to its file. If a write fails, remove all files written so far.

    Raises:
        InvalidInput: A file exists.
    """
    written: list[Path] = []
    try:
        for file, text in texts.items():
            with file.open("x", encoding="utf-8") as stream:
                written.append(file)
                stream.write(text)
    except BaseException as error:
        for file in written:
            file.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            require_new(texts)
        raise


@contextmanager
def directory_for_new_files(directory: Path) -> Iterator[None]:
    """Create ``directory`` if necessary. If it is still empty after the block, remove it and its new parents."""
    created = [parent for parent in (directory, *directory.parents) if not os.path.lexists(parent)]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # stops at the first directory with content
            for parent in created:
                parent.rmdir()
