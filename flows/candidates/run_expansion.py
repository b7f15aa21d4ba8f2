"""Find the checkpoints of a training run, and replace the keys of the run in a recipe with a plain list of models.

Every command expands a recipe when it reads it, so each scheduled run finds the checkpoints that training has saved
since the last one. The result is a plain recipe in mergekit's dialect. A release stores it. If the window has not
changed, the recipe is the same as that of the last release, so there is nothing new.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.adapters import is_adapter, open_adapter
from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.parsing import parse_json, read_plain, read_yaml
from mergegate.merge_core.recipe import (
    RunCheckpoint,
    RunSettings,
    expand_user_path,
    parse_amount,
    parse_run,
    run_recipe,
    select_window,
    step_in_name,
    tokens_in_name,
)

_TRAINER_STATE = "trainer_state.json"
_MAX_STATE_BYTES = 256 << 20  # the log history of a long run
_PATTERN = frozenset("*?[")


@dataclass(frozen=True)
class ExpandedRecipe:
    """The documents of a recipe without keys of training runs.

    Args:
        documents: Plain documents.
        remarks: One line for each window, and one for each directory that is not a complete checkpoint.
    """

    documents: tuple[Mapping[str, Any], ...]
    remarks: tuple[str, ...]

    @property
    def comments(self) -> str:
        """The remarks as YAML comments."""
        return "".join(f"# {' '.join(remark.split())}\n" for remark in self.remarks)


def has_training_run(documents: Sequence[object]) -> bool:
    """Return whether a document of a recipe merges the checkpoints of a training run."""
    return any(isinstance(document, Mapping) and "run" in document for document in documents)


def expand_training_runs(documents: Sequence[Mapping[str, Any]], directory: Path, location: str) -> ExpandedRecipe:
    """Replace each training run in a recipe with the checkpoints of its window.

    Args:
        documents: Documents of the recipe.
        directory: Directory that its paths are relative to.
        location: Name of the recipe in messages.

    Raises:
        InvalidInput: A key of a run is not valid, there is no complete checkpoint, or the step of one is unknown.
    """
    expanded, remarks = list[Mapping[str, Any]](), list[str]()
    for document in documents:
        if "run" not in document:
            expanded.append(document)
            continue
        settings = parse_run(document, location)
        base = document.get("base_model")
        found = list(_local_checkpoints(settings, directory, base, location, remarks))
        window = select_window(found, settings, location)
        expanded.append(run_recipe(document, window, settings.schedule, location))
        first, last = window[0].step, window[-1].step
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        count = f"{len(window)} of {len(found)} checkpoints"
        remarks.append(f"training run: {count}, {steps}, {settings.schedule.name} weights")
    return ExpandedRecipe(tuple(expanded), tuple(remarks))


def _local_checkpoints(
    settings: RunSettings, directory: Path, base: object, location: str, remarks: list[str]
) -> Iterator[RunCheckpoint]:
    """Yield the complete checkpoints of a run. Add a remark for each directory that looks like one but is not."""
    listed_steps = _read_steps(directory / settings.steps_file) if settings.steps_file else {}
    for path in _directories(settings.patterns, directory, f"{location}: run"):
        step = tokens = None
        try:
            if is_adapter(path) and not (path / "config.json").exists():
                open_adapter(path)
                if not isinstance(base, str):
                    raise InvalidInput(
                        f"{location}: run",
                        found="checkpoints that are adapters, without 'base_model'",
                        expected="the model that the adapters belong to",
                        remedy="add 'base_model: MODEL'",
                    )
                model = f"{base}+{os.path.relpath(path, directory)}"
            else:
                open_checkpoint(path)
                model = os.path.relpath(path, directory)
        except (MergegateError, OSError) as error:
            if step_in_name(path.name) is not None:  # other directories, such as logs, need no remark
                reason = f"{error.where}: {error.found}" if isinstance(error, MergegateError) else str(error.strerror)
                remarks.append(f"{path.name}: left out: {reason.replace(f'{path}/', '')}")
            continue
        if path.name in listed_steps:
            step, tokens = listed_steps[path.name]
        else:
            step, tokens = _trainer_state(path)
        step = step_in_name(path.name) if step is None else step
        tokens = tokens_in_name(path.name) if tokens is None else tokens
        if step is None:
            raise InvalidInput(
                f"{location}: run",
                found=f"no training step of {model}: not in its name, and no {_TRAINER_STATE}",
                expected="a name such as checkpoint-1000",
                remedy="list the steps in a file, and add 'steps: FILE'",
            )
        yield RunCheckpoint(model, step, tokens)


def _directories(patterns: Sequence[str], directory: Path, location: str) -> Iterator[Path]:
    """Yield each directory that can be a checkpoint once: the matches of a pattern, or the children of a directory."""
    seen: set[Path] = set()
    for pattern in patterns:
        path = expand_user_path(pattern)
        start = Path(path.anchor) if path.is_absolute() else directory
        try:
            if _PATTERN & set(pattern):
                matches = sorted(start.glob(str(path.relative_to(path.anchor))))
            elif not (directory / path).is_dir():
                raise InvalidInput(
                    location,
                    found=f"no directory {pattern}",
                    expected="the directory of a training run, or a pattern",
                    remedy="correct the path",
                )
            else:
                matches = sorted((directory / path).iterdir())
            directories = [match for match in matches if match.is_dir()]
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidInput(
                location, found=f"{pattern!r:.60} cannot be searched: {error}", expected="a directory or a pattern"
            ) from None
        for candidate in directories:
            if candidate.resolve() not in seen:
                seen.add(candidate.resolve())
                yield candidate


def _trainer_state(checkpoint: Path) -> tuple[int | None, int | None]:
    """Return the step and the number of tokens that the trainer of transformers has stored with a checkpoint."""
    file = checkpoint / _TRAINER_STATE
    if not file.exists():
        return None, None
    state = parse_json(read_plain(file, _MAX_STATE_BYTES), str(file))
    if not isinstance(state, Mapping):
        raise InvalidInput(str(file), found=type(state).__name__, expected="a mapping with global_step")
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
