"""``mergegate init``: a recipe and a profile for models that somebody has, which pass ``check`` as they are.

::

    mergegate init models/base models/math models/code                 # asks what it cannot know
    mergegate init acme/base acme/math acme/code --yes --out nightly   # asks nothing

Method and numbers follow from headers and tokenizers, tasks from what the cards claim, the licence section from what
they declare. Nothing is written before the draft has gone through the same checks as ``mergegate check``, and no file
is ever overwritten. What a person has to settle is said, and stands in the files as a comment.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer
import yaml
from rich.console import Console
from rich.text import Text

from flows.cli.answer import print_answer
from flows.cli.draft import (
    GuardDraft,
    LicenseDraft,
    ProfileDraft,
    RecipeDraft,
    claimed_tasks,
    commented_recipe,
    profile_text,
    recipe_drafts,
    with_template,
)
from flows.cli.recipe_parents import clear_recipe
from flows.preflight import Problems, preflight_profile
from flows.profile import parse_profile
from merge_core import load_recipe
from merge_core.errors import InvalidInput, MergegateError
from merge_core.parsing import open_plain
from merge_core.recipe import expanded
from merge_core.store import state_directory, write_state
from tasks.checkpoints import ResolvedCheckpoint, find_checkpoint, open_parent
from tasks.evaluation import pin_data, pin_task
from tasks.preflight import SAMPLE
from tasks.preflight.licenses import LicenseSettings, check_licenses, license_table, read_licenses
from tasks.publish import front_matter
from tasks.stage import home, store

_LONGEST_CARD = 1 << 20  # bytes
# How a held-out text is called, and where it lies: here, in the new directory, beside the models.
_TEXTS = ("held-out.jsonl", "held-out.txt", "data/held-out.jsonl", "data/held-out.txt")
# Uses, the one that asks for the most first.
_USES = (("commercial", "public"), ("commercial", "private"), ("research", "public"), ("research", "private"))


@dataclass(frozen=True)
class InitRequest:
    """What a person wants, as far as they have said; empty: not said."""

    base: str
    models: tuple[str, ...]
    out: Path
    name: str = ""
    method: str = ""
    documents: Path | None = None
    tasks: tuple[str, ...] = ()  # TASK or TASK=PARENT
    accept: str = ""  # who: why
    asks: bool = False


@dataclass(frozen=True)
class Drafted:
    """Two files, not written yet, and what is left for a person."""

    recipe: str
    profile: str
    sample: str  # held-out text that is written beside them; empty: none
    doubts: tuple[str, ...]


def init_project(request: InitRequest, console: Console, as_json: bool) -> int:
    """Write a recipe and a profile, say what was decided and why, and return the exit code of their check.

    Raises:
        InvalidInput: for models that are not there or fit nothing, and for files that exist.
        Refused: for a repository that may not be read, or a Hub that cannot be reached.
    """
    if not request.models:
        raise InvalidInput("mergegate init", found="no model", expected="the base, then the models to merge")
    out = request.out.absolute()
    found = [_found(text, request.base) for text in (request.base, *request.models)]
    name = request.name or _asked(request, "name of the release", _default_name(request.models))
    files = [out / f"{name}.recipe.yaml", out / f"{name}.yaml"]
    _require_new(files)

    out.mkdir(parents=True, exist_ok=True)  # paths through it are looked up before anything is written
    draft, dtype, parents = _fitting_recipe(request, [_written(one, out) for one in found], out, name)
    console.print(Text(f"recipe   {load_recipe(draft.recipe, where='draft').summary()}", style="bold"))
    console.print(f"         {draft.why}".replace("\n# ", "\n         "))

    license = _license(request, parents, name, out)
    console.print(Text(f"licence  {license.purpose}, {license.visibility}", style="bold"))
    documents, is_sample = _documents(request, found, out)
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
    """Write schemas, text, recipe and profile; then check the profile as it stands there."""
    from flows.cli.schema import schema_text

    out = files[0].parent
    place = home() / "schema"
    schemas = {kind: Path(os.path.relpath(place / f"{kind}.json", out)).as_posix() for kind in ("profile", "recipe")}
    for kind in schemas:
        write_state(state_directory(place) / f"{kind}.json", schema_text(kind).encode())
    if profile.is_sample:
        _write_new(out / profile.documents, "".join(f"{line}\n\n" for line in SAMPLE if line.strip()))
    _write_new(files[0], commented_recipe(draft, dtype, schemas["recipe"]))
    _write_new(files[1], profile_text(replace(profile, schema=schemas["profile"])))

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


def _found(text: str, base: str) -> ResolvedCheckpoint:
    """A model; a directory with an adapter is one that is applied to the base."""
    place = expanded(text)
    is_adapter = (place / "adapter_config.json").is_file() and not (place / "config.json").is_file()
    return find_checkpoint(f"{base}+{text}" if is_adapter else text)


def _written(parent: ResolvedCheckpoint, out: Path) -> object:
    """A model as a recipe in ``out`` writes it: directories relative to that."""
    if parent.adapter is not None:
        model, _, adapter = parent.ref.partition("+")
        return f"{_relative(model, out)}+{_relative(adapter, out)}"
    path = _relative(parent.ref, out)
    return {"model": {"path": path}} if parent.revision is None and ("@" in path or "+" in path) else path


def _relative(text: str, out: Path) -> str:
    place = expanded(text)
    if not place.is_dir():
        return text
    path = Path(os.path.relpath(place.absolute(), out)).as_posix()
    return path if path.startswith(".") else f"./{path}"


def _default_name(models: Sequence[str]) -> str:
    parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model.partition("@")[0]).name).strip("-._") for model in models]
    return "-".join(part for part in parts[:3] if part) or "merge"


def _asked(request: InitRequest, question: str, default: str) -> str:
    return str(typer.prompt(question, default=default)) if request.asks else default


def _require_new(files: Sequence[Path]) -> None:
    if there := [file for file in files if os.path.lexists(file)]:
        raise InvalidInput(
            str(there[0]), found="it exists", expected="a new file", remedy="choose another --name or --out"
        )


def _write_new(file: Path, text: str) -> None:
    """Never over another, whoever wrote it meanwhile."""
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        _require_new([file])


def _fitting_recipe(
    request: InitRequest, written: Sequence[object], out: Path, name: str
) -> tuple[RecipeDraft, str, tuple[ResolvedCheckpoint, ...]]:
    """The first draft that the headers let through, the dtype in which most of the weights are, and its parents."""
    base, *models = written
    problems: list[MergegateError] = []
    for draft in recipe_drafts(base, models, request.method):
        recipe = replace(load_recipe(dict(draft.recipe), where=f"the recipe of {name}"), directory=out)
        try:
            parents, findings = clear_recipe(recipe)
        except MergegateError as error:
            problems.append(error)
            continue
        loses_template = any(finding.where.endswith(": chat template") for finding in findings)
        if loses_template and _has_one_template(parents):
            draft = with_template(draft)
        return draft, _dtype(parents), parents
    raise problems[0]


def _has_one_template(parents: Sequence[ResolvedCheckpoint]) -> bool:
    """Whether one chat template leads among them: a base mostly has none, and its fine-tunes share one."""
    found = Counter(template for parent in parents if (template := open_parent(parent).chat_template) is not None)
    leading = [count for _, count in found.most_common(2)]
    return len(leading) == 1 or (len(leading) == 2 and leading[0] > leading[1])


def _dtype(parents: Sequence[ResolvedCheckpoint]) -> str:
    """That of most bytes, of those that a recipe can name; float32 where none is."""
    sizes: Counter[str] = Counter()
    for parent in parents:
        for tensor in open_parent(parent).tensors.values():
            if tensor.dtype.torch_name in ("bfloat16", "float16", "float32"):
                sizes[tensor.dtype.torch_name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _license(request: InitRequest, parents: Sequence[ResolvedCheckpoint], name: str, out: Path) -> LicenseDraft:
    """The most demanding use that the cards allow; else the one that a person could still settle."""
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
    subjects = list(dict.fromkeys(one.license or one.model for reason in reasons for one in reason.about))
    accept = request.accept
    if reasons and subjects and not accept and request.asks:
        for reason in reasons:
            typer.echo(f"licence: {reason.sentence}")
        accept = str(typer.prompt("who accepts this and why, as 'who: why' (empty: nobody yet)", default=""))
    return LicenseDraft(
        purpose=purpose,
        visibility=visibility,
        declared=verdict.licenses,
        doubts=tuple(reason.sentence for reason in reasons),
        accepted=dict.fromkeys(subjects, accept) if accept and subjects else None,
    )


def _documents(request: InitRequest, found: Sequence[ResolvedCheckpoint], out: Path) -> tuple[str, bool]:
    """The held-out text, relative to the profile, and whether it is our own sample."""
    if request.documents is not None:
        if not request.documents.is_file():
            raise InvalidInput(str(request.documents), found="no such file", expected="held-out text (--documents)")
        return Path(os.path.relpath(request.documents.absolute(), out)).as_posix(), False
    beside = [one.directory.parent for one in found if one.revision is None]
    places = dict.fromkeys([Path.cwd(), out, *beside, *(place.parent for place in beside)])
    there = next((place / text for place in places for text in _TEXTS if (place / text).is_file()), None)
    suggested = os.path.relpath(there) if there else ""
    chosen = _asked(request, "held-out text (jsonl with 'text', or plain; empty: our sample)", suggested)
    if chosen:
        return _documents(replace(request, documents=Path(chosen)), found, out)
    sample = "held-out.sample.txt"
    _require_new([out / sample])
    return sample, True


def _guards(
    request: InitRequest, parents: Sequence[ResolvedCheckpoint], out: Path, console: Console
) -> tuple[GuardDraft, ...]:
    """Tasks that were asked for, and those that the cards claim, each guarded by the first that claims it."""
    asked = {}
    for text in request.tasks:
        task, _, guard = text.partition("=")
        written = Path(os.path.relpath(Path(task).absolute(), out)).as_posix() if Path(task).is_file() else task
        asked[written] = GuardDraft(written, guard or "best parent", "as you asked")
    claimed: dict[str, GuardDraft] = {}
    for parent in parents:
        for task in claimed_tasks(_card(parent)):
            claimed.setdefault(task, GuardDraft(task, parent.name, f"the card of {parent.name} speaks of it"))
    # What a person names is checked with the rest; a claim that cannot be tried here is only mentioned.
    tried = [_tried(guard, out, console) for guard in claimed.values() if guard.task not in asked]
    return (*asked.values(), *tried)


def _card(parent: ResolvedCheckpoint) -> dict[str, object]:
    directories = [parent.adapter.directory] if parent.adapter else [parent.directory]
    for directory in directories:
        try:
            with open_plain(directory / "README.md", within=directory) as file:
                return front_matter(file.read(_LONGEST_CARD).decode(errors="replace")) or {}
        except (InvalidInput, OSError):
            continue
    return {}


def _tried(guard: GuardDraft, out: Path, console: Console) -> GuardDraft:
    console.print(Text(f"task     {guard.task}: {guard.why}; looking for its data", style="dim"))
    try:
        pin_data(pin_task(guard.task, out, store().hashes))
    except MergegateError as error:
        first = str(error).partition("\n")[0]
        return replace(guard, problem=f"{guard.task}: {first}")
    return guard


def is_interactive(yes: bool) -> bool:
    """Whether somebody can be asked."""
    return not yes and sys.stdin.isatty() and sys.stdout.isatty()
