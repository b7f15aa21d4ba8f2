"""Merge a recipe into a directory, without evaluation. The directory is complete or does not exist.

``flows.preflight`` is not used, so that ``mergegate merge`` and ``plan`` start within a second. A merge is recorded in
the project's home, under a digest of the output directory's path, so that it is not repeated. The record is valid only
for the same parents, seed and version of torch, and only while the result is unchanged. Without a valid record,
mergegate refuses to merge into the existing directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from mergegate.flows.candidates import recipe_of_file
from mergegate.merge_core import Checkpoint, Finding, MergePlan, Recipe, merge_weights, plan_merge, plan_with_findings
from mergegate.merge_core.architecture.experts import match_experts
from mergegate.merge_core.engine import EngineSettings, start_or_resume
from mergegate.merge_core.errors import DiskUnavailable, InvalidInput
from mergegate.merge_core.files import (
    FileIdentity,
    file_identity,
    new_directory,
    read_state,
    remove_contents,
    state_directory,
    write_state,
)
from mergegate.merge_core.parsing import MAX_YAML_BYTES, read_text
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.base.stage import home, store
from mergegate.tasks.base.store import digest
from mergegate.tasks.merge import (
    MergeSettings,
    combine_parents,
    numerics,
    prepare_recipe,
    repaired_routing,
    with_new_routers,
)
from mergegate.tasks.models.checkpoints import (
    PinnedCheckpoint,
    ResolvedCheckpoint,
    adapter_findings_of_parents,
    download_snapshots,
    identify_parents,
    open_parent,
    pin_checkpoints,
    require_combinable,
    require_same_files,
    resolve_all_parents,
)


def plan_recipe(recipe: Recipe) -> tuple[tuple[ResolvedCheckpoint, ...], MergePlan]:
    """Return the parents of a recipe and its plan, without checking that they fit each other.

    Raises:
        InvalidInput: Parents do not exist, are not checkpoints, or cannot be planned.
        Refused: Parents are not accessible.
    """
    (parents,) = resolve_all_parents([recipe])
    return parents, plan_merge(recipe, {parent.ref: open_parent(parent) for parent in parents})


@dataclass(frozen=True)
class ClearedRecipe:
    """A recipe that may be merged, with its parents, their headers (``opened``), the plan and warnings (``findings``).

    ``identities`` identifies the parents' files as they were before mergegate opened them. It is empty if a parent is
    on the Hub. ``texts`` identifies the files with calibration texts.
    """

    recipe: Recipe
    parents: tuple[ResolvedCheckpoint, ...]
    identities: Mapping[Path, FileIdentity]
    opened: Mapping[str, Checkpoint]
    plan: MergePlan
    findings: tuple[Finding, ...]
    texts: Mapping[Path, FileIdentity]


def clear_recipe(recipe: Recipe) -> ClearedRecipe:
    """Resolve, open and plan the parents of a recipe, and check that they fit each other.

    Raises:
        InvalidInput: Parents do not exist or are not checkpoints.
        Refused: Parents do not fit each other or are not accessible.
    """
    (parents,) = resolve_all_parents([recipe])
    require_combinable(recipe, parents)
    identities = {} if any(parent.snapshots for parent in parents) else identify_parents(parents)
    opened = {parent.ref: open_parent(parent) for parent in parents}
    planned = plan_with_findings(recipe, opened)
    findings = planned.findings
    if planned.tokenizer_pairs:  # Comparing tokenizers takes a process, so do it only if they differ.
        from mergegate.tasks.preflight import add_segmentation_shares

        findings = add_segmentation_shares(planned)
    if blocking := [finding for finding in findings if finding.severity == "block"]:
        raise blocking[0].refusal()
    assert planned.plan is not None  # otherwise there is a blocking finding
    texts = _texts(recipe)
    findings = (*recipe.all_findings, *findings, *adapter_findings_of_parents(parents, opened))
    return ClearedRecipe(recipe, parents, identities, opened, planned.plan, findings, texts)


def _texts(recipe: Recipe) -> dict[Path, FileIdentity]:
    documents = [document for document in (*recipe.steps, recipe) if document.texts]
    if not documents:
        return {}
    from mergegate.tasks.merge import pin_calibration_texts

    pinned = [text for document in documents for _, text in pin_calibration_texts(document, store().hashes)]
    return {text.path: file_identity(text.path) for text in pinned}


@dataclass(frozen=True)
class MergeOptions:
    """Options of a merge into the directory ``out``. ``seed`` is the seed of the random masks.

    With ``share``, this process works directly in ``out``, together with every process that was started in the same way
    (see ``merge_core.engine``). ``out`` then has no ``config.json`` until the merge is complete. Without ``share``,
    ``out`` does not exist until then.
    """

    out: Path
    seed: int = 0
    device: str = "auto"
    share: bool = False


def merge_recipe(recipe_file: Path, options: MergeOptions, console: Console) -> dict[str, object]:
    """Merge ``recipe_file`` into a directory, and return the result as plain data.

    If the directory already contains the same merge of the same files, do nothing and return ``new: False``.

    Raises:
        InvalidInput: The recipe is invalid, or the directory exists.
        Refused: The parents do not fit, changed during the merge, the result is not healthy, or another merge into the
            same directory is running.
    """
    out = options.out
    out.absolute()  # Report a deleted working directory before parents appear to be missing in it.
    candidate = recipe_of_file(recipe_file)
    for remark in candidate.remarks:
        console.print(remark)
    cleared = clear_recipe(candidate.recipe)
    if options.share and cleared.recipe.output:
        raise InvalidInput(
            f"{recipe_file}: output",
            found="an adapter, with --share",
            expected="a merge of models, because processes cannot divide a combination of adapters",
            remedy="run the command without --share",
        )
    for finding in cleared.findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        console.print(Text(f"{finding.severity}: {finding}{remedy}"))
    if snapshots := [snapshot for parent in cleared.parents for snapshot in parent.snapshots]:
        with _bar(console) as bar:
            job = bar.add_task("fetch", total=None)
            downloaded = download_snapshots(
                snapshots, store().hashes, lambda done, total: bar.update(job, completed=done, total=total)
            )
            bar.update(job, completed=downloaded.bytes, total=downloaded.bytes)
    identities = {**(cleared.identities or identify_parents(cleared.parents)), **cleared.texts}
    record = RecordedMerge(out, recipe_file, identities, MergeSettings(seed=options.seed, device=options.device))
    if not options.share and (recorded := record.find()):
        console.print(f"nothing new: {out} is the merge of this recipe and these parents, and is unchanged")
        return {**recorded, "out": str(out), "new": False}
    if options.share:
        return {**_merge_into(out, cleared, identities, options, console), "new": True}
    remedy = "wait until it ends, choose another directory, or start both with --share to divide the work"
    with new_directory(out, resume=True, by="merge into it", remedy=remedy) as directory:
        result = _merge_into(directory, cleared, identities, options, console)
    try:
        record.store(result)
    except (OSError, DiskUnavailable) as error:  # The output is complete whether or not the next run recognizes it.
        console.print(Text(f"note: {out} is complete, but the merge could not be recorded: {error}"))
    return {**result, "new": True}


def _merge_into(
    directory: Path,
    cleared_recipe: ClearedRecipe,
    identities: Mapping[Path, FileIdentity],
    options: MergeOptions,
    console: Console,
) -> dict[str, object]:
    """Merge into ``directory``, which is renamed to ``options.out`` when it is complete."""
    by_ref = {parent.ref: parent for parent in cleared_recipe.parents}

    def find(ref: str) -> PinnedCheckpoint:
        return pin_checkpoints([by_ref[ref]], store().hashes)[0]

    settings = MergeSettings(seed=options.seed, device=options.device)
    recipe = with_new_routers(prepare_recipe(cleared_recipe.recipe, find), find, numerics(settings))
    if routing := repaired_routing(recipe):
        console.print(routing.sentences)
    for model, why in recipe.left_out.items():
        console.print(f"left out: {model}: {why}")
    if recipe.output:
        return _combine(recipe, directory, cleared_recipe, identities, options, console)
    # The headers of downloaded parents must be read again from the local files.
    opened = (
        cleared_recipe.opened
        if cleared_recipe.identities
        else {parent.ref: open_parent(parent) for parent in cleared_recipe.parents}
    )
    # Comparing experts reads samples of all weights. Do it before the merge only if it changes the plan.
    matched = match_experts(recipe, opened) if recipe.align_experts else None
    if matched:
        plan = plan_merge(matched.recipe, matched.checkpoints)
    else:
        plan = (
            cleared_recipe.plan
            if opened is cleared_recipe.opened and recipe is cleared_recipe.recipe
            else plan_merge(recipe, opened)
        )

    def before_sealing() -> None:
        nonlocal matched
        matched = matched or match_experts(recipe, opened)
        require_same_files(identities)

    if not options.share:
        start_or_resume(directory, plan)
    with _bar(console) as bar:
        job = bar.add_task(recipe.summary(), total=None)
        record = merge_weights(
            plan,
            directory,
            seed=options.seed,
            device=options.device,
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
            if options.share:  # Remove only files of this merge. Another participant may have removed them already.
                for name in record.files:
                    (directory / name).unlink(missing_ok=True)
                with suppress(OSError):
                    directory.rmdir()
            else:
                remove_contents(directory)
            raise finding.refusal()
    resumed = f", {format_bytes(record.bytes_resumed)} of it from an earlier try" if record.bytes_resumed else ""
    size = format_bytes(record.bytes_written)
    tensors = format_count(record.tensors, "tensor")
    console.print(f"{options.out}: {tensors}, {size}{resumed}, in {record.seconds:.1f} s")
    return {
        "out": str(options.out),
        "method": record.method,
        "tensors": record.tensors,
        "bytes_written": record.bytes_written,
        "seconds": record.seconds,
        "files": dict(record.files),
        "findings": [f"{finding.severity}: {finding.where}: {finding.found}" for finding in findings],
    }


def _combine(
    recipe: Recipe,
    directory: Path,
    cleared_recipe: ClearedRecipe,
    identities: Mapping[Path, FileIdentity],
    options: MergeOptions,
    console: Console,
) -> dict[str, object]:
    """Merge adapters into an adapter."""
    remove_contents(directory)  # It cannot be resumed.
    parents = [
        (parent.ref, parent.directory, parent.adapter.directory) for parent in cleared_recipe.parents if parent.adapter
    ]
    with _bar(console) as bar:
        job = bar.add_task(recipe.summary(), total=None)
        combined = combine_parents(
            recipe,
            parents,
            directory,
            seed=options.seed,
            on_progress=lambda done, total: bar.update(job, completed=done, total=total),
        )
    require_same_files(identities)
    modules = format_count(len(combined.errors), "module")
    console.print(f"{options.out}: an adapter of {modules}; it misses {100 * combined.error:.1f} % of the change")
    return {
        "out": str(options.out),
        "method": recipe.merge_method,
        "error": combined.error,
        "modules": {
            module_error.module: {"rank": module_error.rank, "error": module_error.error}
            for module_error in combined.errors
        },
    }


def _bar(console: Console) -> Progress:
    label = TextColumn("{task.description}", markup=False)
    columns = (label, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


_SCHEMA = 1


class RecordedMerge:
    """The record of one merge into one directory.

    Args:
        out: Directory of the merge.
        recipe_file: Recipe of the merge. The record depends on its text, not on its path.
        identities: Identities of the parents' files, which must be local, and of the calibration texts.
        settings: Seed and device of the merge.
    """

    def __init__(
        self, out: Path, recipe_file: Path, identities: Mapping[Path, FileIdentity], settings: MergeSettings
    ) -> None:
        self._out = out
        # Digest of everything that determines the merge.
        self._key = digest(
            {
                "schema": _SCHEMA,
                "recipe": read_text(recipe_file, MAX_YAML_BYTES),
                "parents": {str(path): list(identity) for path, identity in identities.items()},
                "numerics": numerics(settings),
            }
        )
        # The name of the directory need not be valid text.
        self._file = home() / "merges" / f"{digest(os.fsencode(out.absolute()).hex())[:16]}.json"

    def find(self) -> dict[str, Any] | None:
        """Return the recorded result if the directory still contains this merge unchanged, otherwise None."""
        record = read_state(self._file, json.loads)
        if not isinstance(record, dict) or record.get("of") != self._key:
            return None
        result = record.get("told")
        return result if isinstance(result, dict) and record.get("files") == self._files() else None

    def store(self, result: Mapping[str, Any]) -> None:
        """Record the result, and that the files now in the directory are those of this merge."""
        state_directory(self._file.parent)
        record = {"of": self._key, "files": self._files(), "told": dict(result)}
        write_state(self._file, json.dumps(record).encode())

    def _files(self) -> dict[str, list[int]]:
        files = (path for path in sorted(self._out.rglob("*")) if path.is_file())
        return {path.relative_to(self._out).as_posix(): list(file_identity(path)) for path in files}
