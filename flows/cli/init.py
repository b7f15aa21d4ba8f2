"""``mergegate init``: write a recipe and a profile for existing models that pass ``check`` without changes.

::

    mergegate init models/base models/math models/code                 # prompts for missing facts
    mergegate init acme/base acme/math acme/code --yes --out nightly   # no prompts

Method and values follow from headers and tokenizers, tasks from the claims of the model cards, and the license section
from the declared licenses. The draft passes the checks of ``mergegate check`` before files are written, and no file is
ever overwritten. Open decisions are printed, and written to the files as comments.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.fitting_recipe import fitting_recipe, named_model, written_in
from mergegate.flows.cli.new_files import directory_for_new_files, require_new, write_new_files
from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.profile_draft import (
    GuardDraft,
    LicenseDraft,
    ProfileDraft,
    RecipeDraft,
    claimed_tasks,
    commented_recipe,
    profile_text,
)
from mergegate.flows.cli.prompts import ask
from mergegate.flows.preflight import Problems, preflight_profile
from mergegate.flows.profile import is_release_name, parse_profile
from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.files import state_directory, write_state
from mergegate.tasks.checkpoints import ResolvedCheckpoint, read_card
from mergegate.tasks.evaluation import pin_data, pin_task
from mergegate.tasks.perplexity import PerplexitySettings, pin_documents
from mergegate.tasks.preflight import SAMPLE
from mergegate.tasks.preflight.licenses import LicenseSettings, check_licenses, license_table, read_licenses
from mergegate.tasks.stage import home, store

# Names of a held-out text. It is searched in the working directory, the new directory and the models' directories.
_OUR_SAMPLE, _SAMPLE_FILE = "sample", "held-out.sample.txt"
_TEXTS = ("held-out.jsonl", "held-out.txt", "data/held-out.jsonl", "data/held-out.txt")
# Uses, the most demanding one first.
_USES = (("commercial", "public"), ("commercial", "private"), ("research", "public"), ("research", "private"))


@dataclass(frozen=True)
class InitRequest:
    """Arguments of ``mergegate init``. Empty values are not specified."""

    base: str
    models: tuple[str, ...]
    out: Path
    name: str = ""
    method: str = ""
    documents: Path | None = None
    tasks: tuple[str, ...] = ()  # TASK or TASK=PARENT
    accept: str = ""  # who: why
    asks: bool = False


def init_project(request: InitRequest, console: Console, as_json: bool) -> int:
    """Write a recipe and a profile, print all decisions, and return the exit code of their check.

    Raises:
        InvalidInput: A model does not exist, no recipe fits, or a file exists.
        Refused: A repository denies access, or the Hub is not available.
    """
    if not request.models:
        raise InvalidInput("mergegate init", found="no model", expected="the base, then the models to merge")
    models = [named_model(text, request.base) for text in (request.base, *request.models)]
    with directory_for_new_files(request.out.absolute()):  # relative paths are resolved before files are written
        return _init_in(request, models, request.out.absolute(), console, as_json)


def _init_in(
    request: InitRequest, models: Sequence[ResolvedCheckpoint], out: Path, console: Console, as_json: bool
) -> int:
    def free_name(name: str) -> str:
        if not is_release_name(name):
            raise InvalidInput("--name", found=f"{name!r}", expected="letters, digits, '.', '_' and '-'")
        require_new(_files(out, name))
        return name

    name = _answer(request, "name of the release", request.name, _default_name(request.models), free_name)
    files = _files(out, name)
    draft, dtype, parents = fitting_recipe(request.method, [written_in(model, out) for model in models], out, name)
    console.print(Text(f"recipe   {load_recipe(draft.recipe, location='draft').summary()}", style="bold"))
    console.print(f"         {draft.why}".replace("\n# ", "\n         "))

    license = _license(request, parents, name, out)
    console.print(Text(f"licence  {license.purpose}, {license.visibility}", style="bold"))
    documents, is_sample = _documents(request, models, out)
    guards = _guards(request, parents, out, console)
    profile = ProfileDraft(
        name=name,
        recipe=files[0].name,
        license=license,
        documents=documents,
        is_sample=is_sample,
        guards=guards,
        release=f"releases/{name}",
        schema="",
    )
    return _written_out(request, draft, dtype, profile, files, console, as_json)


def _written_out(
    request: InitRequest,
    draft: RecipeDraft,
    dtype: str,
    profile: ProfileDraft,
    files: Sequence[Path],
    console: Console,
    as_json: bool,
) -> int:
    """Write schemas, text, recipe and profile, then check the profile in its final location."""
    from mergegate.flows.cli.schema import schema_text

    out = files[0].parent
    directory = home() / "schema"
    schemas = {
        kind: Path(os.path.relpath(directory / f"{kind}.json", out)).as_posix() for kind in ("profile", "recipe")
    }
    for kind in schemas:
        write_state(state_directory(directory) / f"{kind}.json", schema_text(kind).encode())
    sample = "".join(f"{line}\n\n" for line in SAMPLE if line.strip())
    write_new_files(
        {
            **({out / profile.documents: sample} if profile.is_sample else {}),
            files[0]: commented_recipe(draft, dtype, schemas["recipe"]),
            files[1]: profile_text(replace(profile, schema=schemas["profile"])),
        }
    )

    problems = Problems(stop_at_once=False)
    data = {"root": out, **yaml.safe_load(files[1].read_text(encoding="utf-8"))}
    preflight_profile(parse_profile(data, str(files[1])), problems)
    blocking = [finding for finding in problems.worst_first() if finding.severity == "block"]
    written = [str(file) for file in files]
    left_out = [guard.problem for guard in profile.guards if guard.problem]
    if as_json:
        more = {"files": written, "doubts": [*profile.license.doubts, *left_out]}
        status = "refused" if blocking else "written"
        print_answer(status, f"wrote {', '.join(written)}", more, problems.worst_first())
        return problems.exit_code
    for doubt in (*profile.license.doubts, *left_out):
        console.print(Text(f"!        {doubt}", style="yellow"))
    for file in written:
        console.print(Text(f"wrote    {os.path.relpath(file)}"))
    if profile.is_sample:
        console.print(Text("         its held-out text is a sample of ours: name one of yours (--documents)", "yellow"))
    for finding in blocking:
        console.print(Text(f"✗ {finding}", style="bold red"))
        if finding.remedy:
            console.print(f"    remedy:   {finding.remedy}")
    step = "check" if blocking else "run"
    console.print(Text(f"next     mergegate {step} {os.path.relpath(files[1])}", style="bold"))
    return problems.exit_code


def _default_name(models: Sequence[str]) -> str:
    parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model.partition("@")[0]).name).strip("-._") for model in models]
    return "-".join(part for part in parts[:3] if part) or "merge"


def _files(out: Path, name: str) -> tuple[Path, Path]:
    """Return the paths of the recipe and the profile."""
    return out / f"{name}.recipe.yaml", out / f"{name}.yaml"


def _answer(request: InitRequest, question: str, option: str, default: str, check: Callable[[str], str]) -> str:
    """Return the value of an option, or the user's answer, or the default, after ``check``."""
    if option or not request.asks:
        return check(option or default)
    return ask(question, default, check)


def _license(request: InitRequest, parents: Sequence[ResolvedCheckpoint], name: str, out: Path) -> LicenseDraft:
    """Return the most demanding use that the licenses allow, or else one that a user can still approve."""
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
    accept = ""
    if subjects and (request.asks or request.accept):
        if not request.accept:
            for reason in reasons:
                typer.echo(f"licence: {reason.sentence}")
        question = "who accepts this and why, as 'who: why' (empty: nobody yet)"
        accept = _answer(request, question, request.accept, "", _acceptance)
    return LicenseDraft(
        purpose=purpose,
        visibility=visibility,
        declared=verdict.licenses,
        doubts=tuple(reason.sentence for reason in reasons),
        accepted=dict.fromkeys(subjects, accept) if accept else None,
    )


def _acceptance(text: str) -> str:
    """Return ``text`` if it is a valid acceptance. Empty: nothing is accepted."""
    try:
        LicenseSettings(accepted={"a doubt": text} if text else {})
    except ValidationError:
        raise InvalidInput("--accept", found=f"{text!r}", expected="who accepts it and why, as 'who: why'") from None
    return text


def _documents(request: InitRequest, models: Sequence[ResolvedCheckpoint], out: Path) -> tuple[str, bool]:
    """Return the held-out text, relative to the profile, and whether it is our own sample."""
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

    question = f"held-out text (jsonl with 'text', or plain; '{_OUR_SAMPLE}': a few lines of ours)"
    option = "" if request.documents is None else str(request.documents)
    answer = _answer(request, question, option, os.path.relpath(existing) if existing else _OUR_SAMPLE, readable)
    if answer == _OUR_SAMPLE:
        return _SAMPLE_FILE, True
    return Path(os.path.relpath(Path(answer).absolute(), out)).as_posix(), False


def _guards(
    request: InitRequest, parents: Sequence[ResolvedCheckpoint], out: Path, console: Console
) -> tuple[GuardDraft, ...]:
    """Return the requested tasks, then those in the cards' claims, each guarded by the first model with the claim."""
    requested = {}
    for text in request.tasks:
        task, _, guard = text.partition("=")
        written = Path(os.path.relpath(Path(task).absolute(), out)).as_posix() if Path(task).is_file() else task
        requested[written] = GuardDraft(written, guard or "best parent", "as you asked")
    claimed: dict[str, GuardDraft] = {}
    for parent in parents:
        card = read_card(parent.adapter.directory if parent.adapter else parent.directory)
        for task in claimed_tasks(card.fields):
            claimed.setdefault(task, GuardDraft(task, parent.name, f"the card of {parent.name} speaks of it"))
    # Requested tasks are checked with the rest. A claimed task that cannot run here is only mentioned.
    checked = [_with_problem(guard, out, console) for guard in claimed.values() if guard.task not in requested]
    return (*requested.values(), *checked)


def _with_problem(guard: GuardDraft, out: Path, console: Console) -> GuardDraft:
    console.print(Text(f"task     {guard.task}: {guard.why}; looking for its data", style="dim"))
    try:
        pin_data(pin_task(guard.task, out, store().hashes))
    except MergegateError as error:
        first = str(error).partition("\n")[0]
        return replace(guard, problem=f"{guard.task}: {first}")
    return guard


def is_interactive(yes: bool) -> bool:
    """Return whether the user can be prompted."""
    return not yes and sys.stdin.isatty() and sys.stdout.isatty()
