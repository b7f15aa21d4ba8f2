"""``mergegate merge``: only merge, into a directory that is either complete or does not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from mergegate.flows.cli.merge_cache import merge_key, recall, remember
from mergegate.flows.cli.recipe_parents import ClearedRecipe, clear_recipe
from mergegate.merge_core import Recipe, load_recipe, merge_weights, plan_merge
from mergegate.merge_core.architecture.experts import match_experts
from mergegate.merge_core.engine import EngineSettings, start_or_resume
from mergegate.merge_core.errors import DiskUnavailable
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
    """Merge ``recipe_file`` into ``out`` and return the result as plain data.

    If ``out`` already contains the merge of the same recipe and the same files, nothing is done and ``new`` is false.

    Args:
        share: Whether to work directly in ``out``, together with every process that was started in the same way (see
            ``merge_core.engine``). Until it is complete, the directory has no ``config.json``. Without ``share``, it
            does not exist until it is complete.

    Raises:
        InvalidInput: The recipe is invalid, or ``out`` exists.
        Refused: The parents do not fit, changed during the merge, the result is not healthy, or another merge into
            ``out`` is running.
    """
    remedy = "wait for it, name another directory, or start both with --share to divide the work"
    out.absolute()  # Report a deleted working directory before parents appear to be missing in it.
    cleared = _clear_and_fetch(recipe_file, console)
    identities = {**(cleared.identities or identify_parents(cleared.parents)), **cleared.texts}
    merge_digest = merge_key(recipe_file, identities, seed, device)
    if not share and (recorded := recall(out, merge_digest)):
        console.print(f"nothing new: {out} was made of this recipe and these parents, and is as it was")
        return {**recorded, "out": str(out), "new": False}
    context = nullcontext(out) if share else new_directory(out, resume=True, by="merge into it", remedy=remedy)
    with context as directory:
        result = _merge_into(
            cleared, identities, directory, out, seed=seed, device=device, share=share, console=console
        )
    if not share:
        try:
            remember(out, merge_digest, result)
        except (OSError, DiskUnavailable) as error:  # The output is complete whether or not the next run recognizes it.
            console.print(Text(f"note: {out} is complete, but the merge could not be recorded: {error}"))
    return {**result, "new": True}


def _clear_and_fetch(recipe_file: Path, console: Console) -> ClearedRecipe:
    """Return a recipe that may be merged, after fetching the weights of its parents."""
    cleared = clear_recipe(load_recipe(recipe_file))
    for finding in cleared.findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        console.print(Text(f"{finding.severity}: {finding}{remedy}"))
    _fetch([snapshot for parent in cleared.parents for snapshot in parent.snapshots], console)
    return cleared


def _merge_into(
    cleared: ClearedRecipe,
    identities: Mapping[Path, FileIdentity],
    directory: Path,
    out: Path,
    *,
    seed: int,
    device: str,
    share: bool,
    console: Console,
) -> dict[str, object]:
    """Merge into ``directory``. Messages call it ``out``."""
    parents = cleared.parents
    by_ref = {parent.ref: parent for parent in parents}
    recipe = prepare_recipe(cleared.recipe, lambda ref: pin_checkpoints([by_ref[ref]], store().hashes)[0])
    for model, why in recipe.left_out.items():
        console.print(f"left out: {model}: {why}")
    if recipe.output:
        return _combine(recipe, parents, identities, directory, out, seed=seed, console=console)
    # The headers of downloaded parents must be read again from the local files.
    opened = cleared.opened if cleared.identities else {parent.ref: open_parent(parent) for parent in parents}
    # Comparing experts reads samples of all weights. Do it before the merge only if it changes the plan.
    matched = match_experts(recipe, opened) if recipe.align_experts else None
    if matched:
        plan = plan_merge(matched.recipe, matched.checkpoints)
    else:
        plan = cleared.plan if opened is cleared.opened and recipe is cleared.recipe else plan_merge(recipe, opened)

    def before_sealing() -> None:
        nonlocal matched
        matched = matched or match_experts(recipe, opened)
        require_same_files(identities)

    if not share:
        start_or_resume(directory, plan)
    with _bar(recipe.summary(), console) as bar:
        job = bar.add_task("merge", total=None)
        record = merge_weights(
            plan,
            directory,
            seed=seed,
            device=device,
            settings=EngineSettings(keep_output=False),  # no reader needs the output in the page cache
            on_progress=lambda done, total: bar.update(job, completed=done, total=total),
            before_sealing=before_sealing,
        )
    if record.note:
        console.print(record.note)
    findings = (*(matched.findings if matched else ()), *record.findings)
    for finding in findings:
        console.print(f"{finding.severity}: {finding.where}: {finding.found}")
        if finding.severity == "block":
            if share:  # Remove only files of this merge. Another participant may have removed them already.
                for name in record.files:
                    (directory / name).unlink(missing_ok=True)
                with suppress(OSError):
                    directory.rmdir()
            else:
                remove_contents(directory)
            raise finding.refusal()
    resumed = f", {format_bytes(record.bytes_resumed)} of it already there" if record.bytes_resumed else ""
    size = format_bytes(record.bytes_written)
    console.print(f"{out}: {record.tensors} tensors, {size}{resumed}, in {record.seconds:.1f} s")
    return {
        "out": str(out),
        "method": record.method,
        "tensors": record.tensors,
        "bytes_written": record.bytes_written,
        "seconds": record.seconds,
        "files": dict(record.files),
        "findings": [f"{finding.severity}: {finding.where}: {finding.found}" for finding in findings],
    }


def _combine(
    recipe: Recipe,
    checkpoints: Sequence[ResolvedCheckpoint],
    identities: Mapping[Path, FileIdentity],
    directory: Path,
    out: Path,
    *,
    seed: int,
    console: Console,
) -> dict[str, object]:
    """Merge adapters into an adapter."""
    remove_contents(directory)  # It cannot be resumed.
    parents = [(parent.ref, parent.directory, parent.adapter.directory) for parent in checkpoints if parent.adapter]
    with _bar(recipe.summary(), console) as bar:
        job = bar.add_task("merge", total=None)
        combined = combine_parents(
            recipe,
            parents,
            directory,
            seed=seed,
            on_progress=lambda done, total: bar.update(job, completed=done, total=total),
        )
    require_same_files(identities)
    console.print(
        f"{out}: an adapter of {len(combined.errors)} modules; {combined.error:.2%} of the change is left out"
    )
    return {
        "out": str(out),
        "method": recipe.merge_method,
        "error": combined.error,
        "modules": {
            module_error.module: {"rank": module_error.rank, "error": module_error.error}
            for module_error in combined.errors
        },
    }


def _fetch(snapshots: Sequence[Snapshot], console: Console) -> None:
    """Fetch missing weights of parents on the Hub. Their hashes are stored for later runs."""
    if not snapshots:
        return
    with _bar("fetch", console) as bar:
        job = bar.add_task("fetch", total=None)
        downloaded = download_snapshots(
            snapshots, store().hashes, lambda done, total: bar.update(job, completed=done, total=total)
        )
        bar.update(job, completed=downloaded.bytes, total=downloaded.bytes)


def _bar(label: str, console: Console) -> Progress:
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
