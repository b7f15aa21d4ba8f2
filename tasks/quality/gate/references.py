"""Resolve the names in guards: pin their tasks, and choose the reference model that each guard compares with.

The reference is a parent, the best parent on the guard's task, the champion (the current release) or
the anchor (a release that stays the same over many runs).

``best parent`` is chosen on the documents that judge the merge. If several parents are equally good, the luckiest is
chosen (winner's curse). This does not make it easier to pass, because no parent scored higher. It would make it too
easy to fail, so a failure of the guard is tested as one question per parent (see ``gate.regression``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.models.checkpoints import expect_inputs
from mergegate.tasks.quality.evaluation import EvalTask, pin_built_in, pin_sound_tasks
from mergegate.tasks.quality.gate.settings import (
    ALL_PARENTS,
    ANCHOR,
    BEST_PARENT,
    CHAMPION,
    FINE_TUNES,
    LAST_CHECKPOINT,
    RELEASES,
    Guard,
)


def check_guards(guards: Iterable[Guard], names: Iterable[str]) -> None:
    """Check that the reference of every guard is a parent, 'best parent', 'champion' or 'anchor'.

    ``names`` are the names of the parents.
    """
    parents = sorted(names)
    for position, guard in enumerate(guards):
        location = f"evaluate.tasks[{position}].guarded_by"
        if guard.guarded_by in (BEST_PARENT, *RELEASES):
            if guard.guarded_by in parents:
                raise InvalidInput(
                    location,
                    found=f"{guard.guarded_by!r}, which is also the name of a parent",
                    expected="a parent with a different name",
                    remedy="rename the parent's directory",
                )
        elif guard.guarded_by not in parents:
            is_last = guard.guarded_by == LAST_CHECKPOINT  # With a training run, it would have the checkpoint's name.
            suggestion = suggest(guard.guarded_by, [*parents, BEST_PARENT, CHAMPION])
            raise InvalidInput(
                location,
                found=f"{guard.guarded_by!r}, which is not a model in this merge",
                expected="a recipe with one training run (key 'run')"
                if is_last
                else f"the name of a parent, {BEST_PARENT!r} or {CHAMPION!r}",
                remedy=f"write {BEST_PARENT!r} or the name of a parent" if is_last else suggestion,
            )


def comparable_parents(
    reference: str | Sequence[str], parents: Sequence[str], merged_names: Collection[str], location: str
) -> tuple[str, ...]:
    """Return the parents that 'best parent' chooses from, in their original order.

    Args:
        reference: 'fine-tunes', 'all', one name or several.
        parents: Names of all parents.
        merged_names: Names of the parents whose weights are merged. They do not include a base that task vectors are
            only measured from, because a merge need not match that base on every task.
        location: Name of the setting, for messages.
    """
    if reference == ALL_PARENTS:
        return tuple(parents)
    if reference == FINE_TUNES:
        return tuple(name for name in parents if name in merged_names) or tuple(parents)
    names = (reference,) if isinstance(reference, str) else tuple(reference)
    for name in names:
        if name not in parents:
            raise InvalidInput(
                location,
                found=f"{name!r}, which is not a model in this merge",
                expected=f"{FINE_TUNES!r}, {ALL_PARENTS!r}, or names of parents",
                remedy=suggest(name, [*parents, FINE_TUNES, ALL_PARENTS]),
            )
    return tuple(name for name in parents if name in names)


def needs_champion(guards: Iterable[Guard]) -> bool:
    """Return whether any guard compares with the current release."""
    return any(guard.guarded_by == CHAMPION for guard in guards)


def distinct_guards(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """Return the guards without duplicates, in order. Guards with a metric per task are not hashable."""
    distinct: list[Guard] = []
    for guard in guards:
        if guard not in distinct:
            distinct.append(guard)
    return tuple(distinct)


def with_anchor(guards: Iterable[Guard], anchor: str | None) -> tuple[Guard, ...]:
    """Return the guards and, if there is an anchor, a copy of each champion guard that compares with the anchor."""
    originals = tuple(guards)
    if anchor is None:
        return originals
    anchored = (guard.model_copy(update={"guarded_by": ANCHOR}) for guard in originals if guard.guarded_by == CHAMPION)
    return distinct_guards((*originals, *anchored))


def reference_models(
    guard: Guard, models: Iterable[str], merged_name: str, parents: Collection[str] | None = None
) -> tuple[str, ...]:
    """Return the models that can be the guard's reference. The result is empty if the named model was not evaluated.

    ``models`` are all evaluated models, including the merge and releases. A 'best parent' guard can have every parent
    in ``parents`` as its reference. Default: all parents.
    """
    names = tuple(models)
    if guard.guarded_by == BEST_PARENT:
        return tuple(
            name for name in names if name not in (merged_name, *RELEASES) and (parents is None or name in parents)
        )
    return (guard.guarded_by,) if guard.guarded_by in names else ()


def pin_tasks(
    guards: Sequence[Guard],
    root: Path,
    hashes: HashMemo,
    data: Path | None = None,
    code_tasks: Collection[str] = (),
) -> tuple[tuple[Guard, ...], tuple[EvalTask, ...]]:
    """Pin the tasks of all guards, and return guards that name the pinned tasks, and each pinned task once.

    ``data`` is the directory with datasets, relative to ``root``. Default: the Hub. ``code_tasks`` are the tasks whose
    generated code may be run.

    Raises:
        InvalidInput: ``pin_sound_tasks`` rejects a task, two different tasks share a name, or two guards with one name
            have different prompts, numbers of documents or cluster fields.
    """
    names = (guard.task for guard in guards if guard.built_in is None)
    pinned = pin_sound_tasks(names, root, hashes, data, code_tasks)
    # Each task under the guard's name and with the guard's prompt settings.
    guard_tasks = []
    for guard in guards:
        if guard.built_in is not None:
            task = pin_built_in(guard.built_in, root, hashes).model_copy(update={"name": guard.task})
            expect_inputs(task)
        else:
            task = pinned[guard.task]
        if guard.name not in (None, task.name):
            task = task.model_copy(update={"name": guard.name, "original_name": task.name})
        own = {"prompt_settings": guard.own_prompt_settings, "sample": guard.documents}
        guard_tasks.append(task.model_copy(update=own))
    tasks: dict[str, EvalTask] = {}
    for guard, task in zip(guards, guard_tasks, strict=True):
        first = tasks.setdefault(task.name, task)
        if first.digest != task.digest:
            raise InvalidInput(
                f"evaluate.tasks: {guard.task}",
                found=f"the name {task.name!r}, which another task of this profile has too",
                expected="a different name for each task",
                remedy=f"set name: {task.name}-2 in one of the guards" if guard.built_in else "rename it under 'task'",
            )
        if first.prompt_settings != task.prompt_settings:
            prompts = (
                item.prompt_settings.describe() if item.prompt_settings else "the profile's prompts"
                for item in (first, task)
            )
            raise InvalidInput(
                f"evaluate.tasks: {guard.task}",
                found=f"two prompt settings under the name {task.name!r}: {' and '.join(prompts)}",
                expected="one prompt setting per name",
                remedy=f"set name: {task.name}-2 in one of the guards",
            )
    for option, field, noun in (("documents", "sample", "number"), ("cluster_by", "cluster_field", "field")):
        for guard, guard_task in zip(guards, guard_tasks, strict=True):
            value = getattr(guard, option)
            if value in (None, "task"):  # The task of a document is always available.
                continue
            task = tasks[guard_task.name]
            if (current := getattr(task, field)) not in (None, value):
                raise InvalidInput(
                    f"evaluate.tasks: {guard.task}: {option}",
                    found=f"{value!r}, and {current!r} in another guard of the task",
                    expected=f"the same {noun} for all guards of a task",
                )
            tasks[task.name] = task.model_copy(update={field: value})
    renamed = tuple(
        guard.model_copy(update={"task": task.name, "name": None})
        for guard, task in zip(guards, guard_tasks, strict=True)
    )
    return renamed, tuple(tasks.values())
