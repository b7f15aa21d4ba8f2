"""Find the checkpoints of a training run, and replace the keys of the run in a recipe with a plain list of models.

Every command expands a recipe when it reads it, so each scheduled run finds the checkpoints that training has saved
since the last one. The result is a plain recipe in mergekit's dialect, which a release stores. An unchanged window
expands to the recipe of the last release, so the run ends as "nothing new".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from mergegate.merge_core import Checkpoint, open_checkpoint
from mergegate.merge_core.adapters import CONFIG_FILE as ADAPTER_CONFIG
from mergegate.merge_core.adapters import Adapter, is_adapter, open_adapter
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused, to_printable
from mergegate.merge_core.files import FileIdentity, file_identity
from mergegate.merge_core.parsing import JsonBounds, parse_json, read_plain, read_yaml
from mergegate.merge_core.recipe import (
    RunCheckpoint,
    RunSettings,
    RunWindow,
    expand_user_path,
    is_window_full,
    parse_amount,
    parse_reference,
    parse_run,
    part_in_name,
    run_recipe,
    select_window,
    step_in_name,
    steps_in_names,
    tokens_in_name,
)
from mergegate.tasks.models.checkpoints.hub import RevisionList, list_revisions

_CONFIG = "config.json"
_TRAINER_STATE = "trainer_state.json"
_STATE_BOUNDS = JsonBounds(size=256 << 20, values=5_000_000)  # the log history of a long run
_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)@([^@+]+)")


@dataclass(frozen=True)
class ExpandedRecipe:
    """The documents of a recipe without keys of training runs.

    Args:
        documents: Plain documents.
        remarks: One line for each window, and one for each directory that is not a complete checkpoint.
        windows: Window of each training run.
    """

    documents: tuple[Mapping[str, Any], ...]
    remarks: tuple[str, ...]
    windows: tuple[RunWindow, ...] = ()

    @property
    def comments(self) -> str:
        """The remarks as YAML comments, in which control characters of names are escaped."""
        return "".join(f"# {to_printable(' '.join(remark.split()))}\n" for remark in self.remarks)


@dataclass(frozen=True)
class _Saved:
    """A checkpoint that a run has saved, before it is opened. It may be incomplete.

    Args:
        name: Name in remarks: the path below the directory of the run, or the revision.
        model: Reference, as a recipe writes it.
        open: Function that reads its headers.
        path: Directory on this machine, which no remark shows. None on the Hub.
        state: Step and number of tokens that its trainer stored. None without ``trainer_state.json``.
    """

    name: str
    model: str | Mapping[str, Any]
    open: Callable[[], Checkpoint | Adapter]
    path: Path | None = None
    state: tuple[int | None, int | None] | None = None


def names_training_run(text: str) -> bool:
    """Return whether ``text`` names a training run: revisions on the Hub, a pattern, or a directory of checkpoints."""
    if is_pattern(text):
        return True
    path = expand_user_path(text)
    if not matching_directories(text, Path(), text) or (path / _CONFIG).exists() or is_adapter(path):
        return False
    return next(_directories(text, Path(), text), None) is not None


def expand_training_runs(documents: Sequence[Mapping[str, Any]], directory: Path, location: str) -> ExpandedRecipe:
    """Replace each training run in a recipe with the checkpoints of its window.

    Only headers are read, from the newest checkpoint back to the beginning of the window.

    Args:
        documents: Documents of the recipe.
        directory: Directory that its paths are relative to.
        location: Name of the recipe in messages.

    Raises:
        InvalidInput: A key of a run is not valid, there is no complete checkpoint, or no step is known.
        Refused: The Hub denies access or is not reachable.
    """
    expanded, remarks, windows = list[Mapping[str, Any]](), list[str](), list[RunWindow]()
    for document in documents:
        if "run" not in document:
            expanded.append(document)
            continue
        settings = parse_run(document, location)
        saved = _saved_checkpoints(settings, directory, document.get("base_model"), location, remarks)
        known = _with_steps(saved, settings, directory, location, remarks)
        complete = _complete_checkpoints(known, settings, location, remarks)
        window = select_window(complete, settings, location)
        expanded.append(run_recipe(document, window, settings.schedule, location))
        references = tuple(str(parse_reference(checkpoint.model, location)) for checkpoint in window)
        windows.append(RunWindow(references, window[0].step, window[-1].step, settings.schedule.name))
        count = f"{len(window)} of {len(known)} checkpoints"
        remarks.append(f"training run: {count}, {windows[-1].steps}, {settings.schedule.name} weights")
    return ExpandedRecipe(tuple(expanded), tuple(remarks), tuple(windows))


def _saved_checkpoints(
    settings: RunSettings, directory: Path, base: object, location: str, remarks: list[str]
) -> tuple[_Saved, ...]:
    """Return everything that can be a checkpoint of a run, in no particular order."""
    saved = list[_Saved]()
    paths = list[tuple[str, Path]]()
    for pattern in settings.patterns:
        match = _ON_HUB.fullmatch(pattern)
        # Path.exists raises for long names.
        if match and not any(map(os.path.exists, (directory / expand_user_path(pattern), directory / match[1]))):
            revisions = list_revisions(match[1], match[2])
            saved += _saved_revisions(revisions, base, location)
            if revisions.access is None:
                remarks.append(f"{pattern}: without network access, only revisions in the Hub's cache are used")
        else:
            paths += _directories(pattern, directory, f"{location}: run")
    # A link such as 'latest' is the same checkpoint as its target.
    distinct: dict[Path, tuple[str, Path]] = {}
    for name, path in sorted(paths, key=lambda entry: (entry[1].is_symlink(), entry[0])):
        distinct.setdefault(path.resolve(), (name, path))
    is_absolute = any(expand_user_path(pattern).is_absolute() for pattern in settings.patterns)
    for name, path in distinct.values():
        adapter = is_adapter(path) and not (path / _CONFIG).exists()
        text = str(path) if is_absolute else os.path.relpath(path, directory)
        model = _reference(text, None, _base_of_adapter(base, location) if adapter else None)
        opener = partial(open_adapter if adapter else open_checkpoint, path)
        try:
            saved.append(_Saved(name, model, opener, path, _trainer_state(path)))
        except (MergegateError, OSError) as error:
            remarks.append(f"{name}: left out: {_reason(error, path)}")
    return tuple(saved)


def _saved_revisions(revisions: RevisionList, base: object, location: str) -> Iterator[_Saved]:
    """Yield the revisions of a run on the Hub. Read their trainer state only if no name has a step."""
    steps = steps_in_names(list(revisions.commits))
    newest = max(revisions.commits, key=lambda name: steps.get(name, -1))
    adapter = not revisions.read(newest, _CONFIG) and revisions.read(newest, ADAPTER_CONFIG) is not None
    base_of_adapter = _base_of_adapter(base, location) if adapter else None
    for name, commit in revisions.commits.items():
        state = None
        if not steps and (content := revisions.read(name, _TRAINER_STATE)):
            state = _parse_state(content, f"{revisions.repo}@{name}: {_TRAINER_STATE}")
        # The commit replaces a name that a reference cannot contain, or that cannot be resolved without a network.
        revision = commit if revisions.access is None or set(name) & set("@+ ") else name
        model = _reference(revisions.repo, revision, base_of_adapter)
        yield _Saved(name, model, partial(revisions.open, name, is_adapter=adapter), None, state)


def _with_steps(
    candidates: Sequence[_Saved], settings: RunSettings, directory: Path, location: str, remarks: list[str]
) -> tuple[tuple[_Saved, RunCheckpoint], ...]:
    """Return the checkpoints whose step is known: from the file of the user, the trainer state, or the names."""
    listed = _read_steps(directory / expand_user_path(settings.steps_file)) if settings.steps_file else {}
    by_name = steps_in_names([checkpoint.name for checkpoint in candidates])
    known, unknown = list[tuple[_Saved, RunCheckpoint]](), list[_Saved]()
    for checkpoint in candidates:
        name, (state_step, tokens) = checkpoint.name, checkpoint.state or (None, None)
        part: tuple[int, ...] = ()
        if entry := listed.get(name) or listed.get(Path(name).name):
            step, tokens = entry[0], entry[1] or tokens
        elif state_step is not None:
            step = state_step
            if (named := step_in_name(name)) not in (None, step):
                remarks.append(f"{name}: {_TRAINER_STATE} has step {step}, which counts instead of {named}")
        elif name in by_name:
            step, part = by_name[name], part_in_name(name)
        else:
            unknown.append(checkpoint)
            continue
        tokens = tokens_in_name(name) if tokens is None else tokens
        known.append((checkpoint, RunCheckpoint(checkpoint.model, step, tokens, part)))
    if unknown and not known:
        raise InvalidInput(
            f"{location}: run",
            found=f"no training step of {unknown[0].name}: not in its name, and no {_TRAINER_STATE}",
            expected="a name such as checkpoint-1000",
            remedy="list the steps in a file, and add 'steps: FILE'",
        )
    remarks += [f"{checkpoint.name}: left out: its training step is unknown" for checkpoint in unknown]
    names = {name for one in candidates for name in (one.name, Path(one.name).name)}
    remarks += [f"{settings.steps_file}: no checkpoint is named {name!r}" for name in listed if name not in names]
    return tuple(known)


def _complete_checkpoints(
    candidates: Sequence[tuple[_Saved, RunCheckpoint]], settings: RunSettings, location: str, remarks: list[str]
) -> list[RunCheckpoint]:
    """Open the checkpoints from the newest on until the window is full, and return the complete ones of one model.

    Training may be writing a checkpoint at this moment, so an incomplete one is left out. A checkpoint of another model
    than the newest is left out too, because the run was restarted. If a step has several copies, the one with the
    plainest name is used.
    """
    unit, distance = settings.every
    eligible = [entry for entry in candidates if unit != "steps" or entry[1].step % distance == 0]
    if not eligible:
        raise InvalidInput(
            f"{location}: {'every' if candidates else 'run'}",
            found=f"no step is a multiple of {distance}" if candidates else f"no checkpoint in {settings.patterns[0]}",
            expected="at least one checkpoint",
            remedy="wait for the first checkpoint, or correct "
            + ("'every'" if candidates else "the path: it is the directory that contains the checkpoints"),
        )
    complete, reasons = list[RunCheckpoint](), list[str]()
    newest: tuple[str, dict[str, object]] | None = None
    with_state = sum(checkpoint.state is not None for checkpoint, _ in candidates)
    others_have_states = settings.steps_file is None and with_state == len(candidates) - 1 > 0

    def newest_first(entry: tuple[_Saved, RunCheckpoint]) -> tuple[int, bool, int, str]:
        checkpoint, run_checkpoint = entry
        return -run_checkpoint.step, step_in_name(checkpoint.name) is None, len(checkpoint.name), checkpoint.name

    for step, group in groupby(sorted(eligible, key=newest_first), key=lambda entry: entry[1].step):
        names = list[str]()
        for checkpoint, run_checkpoint in group:
            name = checkpoint.name
            try:
                if any(step_in_name(name) is None or name.startswith(used) for used in names):
                    reasons.append(f"{name}: left out: another copy of step {step}")
                    continue
                if newest is None and others_have_states and checkpoint.state is None:
                    reasons.append(f"{name}: left out: no {_TRAINER_STATE} yet, which the trainer writes last")
                    continue
                shape = _shape(checkpoint.open())
            except (MergegateError, OSError) as error:
                if isinstance(error, Refused):
                    raise
                reasons.append(f"{name}: left out: {_reason(error, checkpoint.path)}")
                continue
            newest = newest or (name, shape)
            if different := next((key for key in {**newest[1], **shape} if newest[1].get(key) != shape.get(key)), None):
                reasons.append(f"{name}: left out: another model than {newest[0]}: {different} differs")
                continue
            names.append(name)
            complete.append(run_checkpoint)
        if is_window_full(complete, settings, location):
            break
    if not complete and reasons:
        raise InvalidInput(
            f"{location}: run",
            found=f"no complete checkpoint; {reasons[0]}",
            expected="at least one complete checkpoint",
            remedy="wait for the first checkpoint, or correct the path or the pattern",
        )
    remarks += reasons
    return complete


def _shape(checkpoint: Checkpoint | Adapter) -> dict[str, object]:
    """Return the architecture and the shape of each tensor, which must be equal in all checkpoints of a run."""
    if isinstance(checkpoint, Adapter):
        return {tensor.name: tuple(tensor.shape) for tensor in checkpoint.stored_tensors}
    shape: dict[str, object] = {"model_type": checkpoint.config.get("model_type")}
    return shape | {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}


def _base_of_adapter(base: object, location: str) -> str:
    if not isinstance(base, str):
        raise InvalidInput(
            f"{location}: run",
            found="checkpoints that are adapters, without 'base_model'",
            expected="the model that the adapters belong to",
            remedy="add 'base_model: MODEL'",
        )
    return base


def _reference(path: str, revision: str | None, base: str | None) -> str | Mapping[str, Any]:
    """Return a reference to a model, or to ``base`` with an adapter. A path with @ or + needs the form of a mapping."""
    text = f"{path}@{revision}" if revision else path
    if not set(path) & set("@+"):
        return f"{base}+{text}" if base else text
    entry = {"path": path} | ({"revision": revision} if revision else {})
    if base is None:
        return {"model": entry}
    parsed = parse_reference(base, "base_model")
    base_entry = {"path": parsed.path} | ({"revision": parsed.revision} if parsed.revision else {})
    return {"model": base_entry, "lora": entry}


def _reason(error: MergegateError | OSError, path: Path | None) -> str:
    """Return why a checkpoint cannot be opened, without its path on this machine: a release shows the reason."""
    if isinstance(error, OSError):
        return str(error.strerror)
    reason = f"{error.where}: {error.found}"
    for prefix in (path, path.absolute(), path.resolve()) if path else ():
        reason = reason.replace(f"{prefix}/", "").replace(f"{prefix}: ", "").replace(str(prefix), "its directory")
    return reason


def _directories(pattern: str, directory: Path, location: str) -> Iterator[tuple[str, Path]]:
    """Yield the directories that can be checkpoints, with their paths below the directory of the run.

    These are the matches of a pattern, or the children of a directory that have the configuration of a model or of an
    adapter, or a step in their name.
    """
    if not is_pattern(pattern):
        if not matching_directories(pattern, directory, location):
            hint = "correct the path" + (", or write org/name@PATTERN for a run on the Hub" * (pattern.count("/") == 1))
            raise InvalidInput(
                location,
                found=f"no directory {pattern:.60}",
                expected="the directory of a training run, or a pattern",
                remedy=hint,
            )
        pattern = f"{pattern}/*"
    parts = expand_user_path(pattern).parts
    root = directory.joinpath(*parts[: next(index for index, part in enumerate(parts) if is_pattern(part))])
    for match in matching_directories(pattern, directory, location):
        name = match.relative_to(root).as_posix()
        # Path.is_file raises for a directory that may not be searched, such as lost+found.
        has_config = os.path.isfile(match / _CONFIG)  # noqa: PTH113
        if has_config or is_adapter(match) or step_in_name(name) is not None:
            yield name, match


def is_pattern(text: str) -> bool:
    """Return whether a path contains wildcards, so that it can match several directories."""
    return not frozenset("*?[").isdisjoint(text)


def matching_directories(pattern: str, directory: Path, location: str) -> list[Path]:
    """Return the directory with the path ``pattern``, or all directories that match it, in alphabetical order.

    The list is empty if there is none.

    Args:
        pattern: Path, relative to ``directory`` or absolute. ``~`` is the home directory.
        directory: Directory that the path is relative to.
        location: Key of the pattern in messages.
    """
    path = expand_user_path(pattern)
    start = Path(path.anchor) if path.is_absolute() else directory
    try:
        matches = sorted(start.glob(str(path.relative_to(path.anchor)))) if is_pattern(pattern) else [directory / path]
        return [match for match in matches if match.is_dir()]
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(
            location, found=f"{pattern!r:.60} cannot match a directory: {error}", expected="a directory or a pattern"
        ) from None


def _trainer_state(checkpoint: Path) -> tuple[int | None, int | None] | None:
    """Return the step and the number of tokens that the trainer of transformers has stored, or None without its file.

    Every command lists the checkpoints several times, and the file has the log of the whole run, so it is read once.
    """
    file = checkpoint / _TRAINER_STATE
    return _read_state(file, file_identity(file)) if file.exists() else None


@lru_cache(maxsize=4096)
def _read_state(file: Path, identity: FileIdentity) -> tuple[int | None, int | None]:
    return _parse_state(read_plain(file, _STATE_BOUNDS.size), str(file))


def _parse_state(content: bytes, location: str) -> tuple[int | None, int | None]:
    state = parse_json(content, location, bounds=_STATE_BOUNDS)
    if not isinstance(state, Mapping):
        raise InvalidInput(location, found=type(state).__name__, expected="a mapping with global_step")
    step, tokens = state.get("global_step"), state.get("num_input_tokens_seen")
    return (step if type(step) is int else None), (tokens if type(tokens) is int and tokens > 0 else None)


def _read_steps(file: Path) -> Mapping[str, tuple[int, int | None]]:
    """Return the step and the number of tokens of each checkpoint by name, from a file that the user wrote."""
    documents = read_yaml(file, "a file with the step of each checkpoint (YAML or JSON)")
    listed = documents[0] if len(documents) == 1 else None
    if not isinstance(listed, Mapping) or not listed:
        raise InvalidInput(
            str(file), found=f"{listed!r:.60}", expected="a mapping, such as {epoch-1: 500, epoch-2: 1000}"
        )
    steps: dict[str, tuple[int, int | None]] = {}
    for name, value in listed.items():
        entry = value if isinstance(value, Mapping) else {"step": value}
        step, tokens = entry.get("step"), entry.get("tokens")
        if type(step) is not int or step < 0 or (tokens is not None and parse_amount(tokens) is None):
            raise InvalidInput(f"{file}: {name}", found=f"{value!r:.60}", expected="a step, or {step: 500, tokens: 4B}")
        steps[str(name)] = step, parse_amount(tokens) if tokens is not None else None
    return steps
