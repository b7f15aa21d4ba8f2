"""``mergegate merge``: only the merge, into a directory that exists whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from mergegate.flows.cli.merge_cache import made_of, recall, remember
from mergegate.flows.cli.recipe_parents import ClearedRecipe, clear_recipe
from mergegate.merge_core import Recipe, load_recipe, merge_weights, plan_merge
from mergegate.merge_core.architecture.experts import match_experts
from mergegate.merge_core.engine import EngineSettings, start_or_resume
from mergegate.merge_core.errors import DiskRefused
from mergegate.merge_core.files import FileIdentity, new_directory, remove_contents
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.checkpoints import (
    ResolvedCheckpoint,
    identify_parents,
    open_parent,
    pin_checkpoints,
    require_same_files,
)
from mergegate.tasks.checkpoints.hub import Snapshot, download_snapshots
from mergegate.tasks.merge import combine_parents, prepare_recipe
from mergegate.tasks.stage import store


def merge_to(
    recipe_file: Path, out: Path, *, seed: int, device: str, share: bool, console: Console
) -> dict[str, object]:
    """Merge ``recipe_file`` into ``out`` and return what was made, as plain data; also where it was made before, of the
    same recipe and the same files, and nothing is made now (``new`` is false).

    Args:
        share: Work directly in ``out``, together with every process that was started alike (see ``merge_core.engine``);
            until it is finished it has no ``config.json``. Alone, it does not exist until it is finished.

    Raises:
        InvalidInput: for a recipe that cannot mean anything, or an ``out`` that exists.
        Refused: when the parents do not fit each other, are changed while they are merged, what came out is not
            healthy, or another merge into ``out`` is running.
    """
    remedy = "wait for it, name another directory, or start both with --share to divide the work"
    out.absolute()  # A working directory that is gone is said before parents are missed in it.
    cleared = _cleared(recipe_file, console)
    looked = {**(cleared.looked or identify_parents(cleared.found)), **cleared.texts}
    of = made_of(recipe_file, looked, seed, device)
    if not share and (told := recall(out, of)):
        console.print(f"nothing new: {out} was made of this recipe and these parents, and is as it was")
        return {**told, "out": str(out), "new": False}
    directory = nullcontext(out) if share else new_directory(out, resume=True, by="merge into it", remedy=remedy)
    with directory as place:
        made = _merge_to(cleared, looked, place, out, seed=seed, device=device, share=share, console=console)
    if not share:
        try:
            remember(out, of, made)
        except (OSError, DiskRefused) as error:  # The output is complete whether or not the next run recognizes it.
            console.print(Text(f"note: {out} is complete, but the merge could not be recorded: {error}"))
    return {**made, "new": True}


def _cleared(recipe_file: Path, console: Console) -> ClearedRecipe:
    """A recipe that may be carried out, and its parents, whose weights are here."""
    cleared = clear_recipe(load_recipe(recipe_file))
    for finding in cleared.findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        console.print(Text(f"{finding.severity}: {finding}{remedy}"))
    _fetch([one for parent in cleared.found for one in parent.snapshots], console)
    return cleared


def _merge_to(
    cleared: ClearedRecipe,
    looked: Mapping[Path, FileIdentity],
    place: Path,
    out: Path,
    *,
    seed: int,
    device: str,
    share: bool,
    console: Console,
) -> dict[str, object]:
    """Merge into ``place``, which is called ``out`` to people."""
    found = cleared.found
    by_ref = {parent.ref: parent for parent in found}
    recipe = prepare_recipe(cleared.recipe, lambda ref: pin_checkpoints([by_ref[ref]], store().hashes)[0])
    for model, why in recipe.left_out.items():
        console.print(f"left out: {model}: {why}")
    if recipe.output:
        return _combine(recipe, found, looked, place, out, seed=seed, console=console)
    # Headers from afar are read again where they came to lie.
    opened = cleared.opened if cleared.looked else {parent.ref: open_parent(parent) for parent in found}
    # Comparing experts reads samples of all weights: before the merge only where it decides what is merged with what.
    matched = match_experts(recipe, opened) if recipe.align_experts else None
    if matched:
        plan = plan_merge(matched.recipe, matched.checkpoints)
    else:
        plan = cleared.plan if opened is cleared.opened and recipe is cleared.recipe else plan_merge(recipe, opened)

    def before_sealing() -> None:
        nonlocal matched
        matched = matched or match_experts(recipe, opened)
        require_same_files(looked)

    if not share:
        start_or_resume(place, plan)
    with _bar(recipe.summary(), console) as bar:
        job = bar.add_task("merge", total=None)
        record = merge_weights(
            plan,
            place,
            seed=seed,
            device=device,
            settings=EngineSettings(keep_output=False),  # Nobody here reads it next.
            on_progress=lambda done, total: bar.update(job, completed=done, total=total),
            before_sealing=before_sealing,
        )
    if record.note:
        console.print(record.note)
    odd = (*(matched.findings if matched else ()), *record.findings)
    for finding in odd:
        console.print(f"{finding.severity}: {finding.where}: {finding.found}")
        if finding.severity == "block":
            if share:  # Only what this merge wrote; another participant may have removed it already.
                for name in record.files:
                    (place / name).unlink(missing_ok=True)
                with suppress(OSError):
                    place.rmdir()
            else:
                remove_contents(place)
            raise finding.refusal()
    there = f", {format_bytes(record.bytes_resumed)} of it already there" if record.bytes_resumed else ""
    size = format_bytes(record.bytes_written)
    console.print(f"{out}: {record.tensors} tensors, {size}{there}, in {record.seconds:.1f} s")
    return {
        "out": str(out),
        "method": record.method,
        "tensors": record.tensors,
        "bytes_written": record.bytes_written,
        "seconds": record.seconds,
        "files": dict(record.files),
        "findings": [f"{finding.severity}: {finding.where}: {finding.found}" for finding in odd],
    }


def _combine(
    recipe: Recipe,
    found: Sequence[ResolvedCheckpoint],
    looked: Mapping[Path, FileIdentity],
    place: Path,
    out: Path,
    *,
    seed: int,
    console: Console,
) -> dict[str, object]:
    """Merge adapters into an adapter."""
    remove_contents(place)  # It cannot be resumed.
    parents = [(one.ref, one.directory, one.adapter.directory) for one in found if one.adapter]
    with _bar(recipe.summary(), console) as bar:
        job = bar.add_task("merge", total=None)
        made = combine_parents(
            recipe,
            parents,
            place,
            seed=seed,
            on_progress=lambda done, total: bar.update(job, completed=done, total=total),
        )
    require_same_files(looked)
    console.print(f"{out}: an adapter of {len(made.errors)} modules; {made.error:.2%} of the change is left out")
    return {
        "out": str(out),
        "method": recipe.merge_method,
        "error": made.error,
        "modules": {one.module: {"rank": one.rank, "error": one.error} for one in made.errors},
    }


def _fetch(snapshots: Sequence[Snapshot], console: Console) -> None:
    """The weights of parents on the Hub, where they are not here yet; what was hashed is remembered where runs do."""
    if not snapshots:
        return
    with _bar("fetch", console) as bar:
        job = bar.add_task("fetch", total=None)
        come = download_snapshots(
            snapshots, store().hashes, lambda done, total: bar.update(job, completed=done, total=total)
        )
        bar.update(job, completed=come.bytes, total=come.bytes)


def _bar(what: str, console: Console) -> Progress:
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
