"""Choose the model that a guard compares the merge with.

A guard names a parent, the best parent on its task, the champion (the release that is published today) or an anchor (a
release that does not change, however many runs follow).

``best parent`` is chosen on the same documents that judge the merge. This choice flatters the reference, because the
luckiest of several equally good parents is taken (winner's curse). It does not make passing easier, since no parent
scored above the chosen one. It would make an alarm too easy, so there the guard counts as one question per parent (see
``tasks.gate.regression``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.gate.guards import ALL_PARENTS, ANCHOR, BEST_PARENT, CHAMPION, FINE_TUNES, RELEASES, Guard


def check_guards(guards: Iterable[Guard], names: Iterable[str]) -> None:
    """Raise InvalidInput unless the reference of every guard exists, or may exist when the guard is judged.

    Args:
        names: Names of the parents.

    Raises:
        InvalidInput: For the first reference that does not exist, with a suggestion, or for a parent whose name is
            reserved.
    """
    parents = sorted(names)
    for position, guard in enumerate(guards):
        location = f"evaluate.tasks[{position}].guarded_by"
        if guard.guarded_by in (BEST_PARENT, *RELEASES):
            if guard.guarded_by in parents:
                raise InvalidInput(
                    location,
                    found=f"{guard.guarded_by!r}, which is also the name of a parent",
                    expected="one meaning",
                    remedy="rename the parent's directory",
                )
        elif guard.guarded_by not in parents:
            raise InvalidInput(
                location,
                found=f"{guard.guarded_by!r}, which is no model of this merge",
                expected=f"the name of a parent, {BEST_PARENT!r} or {CHAMPION!r}",
                remedy=suggest(guard.guarded_by, [*parents, BEST_PARENT, CHAMPION]),
            )


def comparable_parents(
    reference: str | Sequence[str], parents: Sequence[str], merged: Collection[str], location: str
) -> tuple[str, ...]:
    """Return the parents that 'best parent' chooses from, in their original order.

    Args:
        reference: 'fine-tunes', 'all', one name or several.
        parents: Names of all parents.
        merged: Names of parents whose weights are merged. A base that task vectors are only measured from is not one of
            them, because a merge does not have to be better at everything than the base model.
        location: Setting that messages name.

    Raises:
        InvalidInput: For a name that is not the name of a parent.
    """
    if reference == ALL_PARENTS:
        return tuple(parents)
    if reference == FINE_TUNES:
        return tuple(name for name in parents if name in merged) or tuple(parents)
    names = (reference,) if isinstance(reference, str) else tuple(reference)
    for name in names:
        if name not in parents:
            raise InvalidInput(
                location,
                found=f"{name!r}, which is no model of this merge",
                expected=f"{FINE_TUNES!r}, {ALL_PARENTS!r}, or names of parents",
                remedy=suggest(name, [*parents, FINE_TUNES, ALL_PARENTS]),
            )
    return tuple(name for name in parents if name in names)


def needs_champion(guards: Iterable[Guard]) -> bool:
    """Return whether any guard compares with the release that is published today."""
    return any(guard.guarded_by == CHAMPION for guard in guards)


def distinct_guards(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """Return each guard once, in order. Guards with a metric per task are not hashable, so this compares pairs."""
    distinct: list[Guard] = []
    for guard in guards:
        if guard not in distinct:
            distinct.append(guard)
    return tuple(distinct)


def with_anchor(guards: Iterable[Guard], anchor: str | None) -> tuple[Guard, ...]:
    """Return the guards, plus a copy against the anchor of each guard against the champion, if there is an anchor.

    One run may lose a little against yesterday's release, but all runs together may not lose more than one run may.
    """
    originals = tuple(guards)
    if anchor is None:
        return originals
    anchored = (guard.model_copy(update={"guarded_by": ANCHOR}) for guard in originals if guard.guarded_by == CHAMPION)
    return distinct_guards((*originals, *anchored))


def reference_models(
    guard: Guard, models: Iterable[str], merged: str, parents: Collection[str] | None = None
) -> tuple[str, ...]:
    """Return the models that the guard may compare with: one, several parents, or none if the release does not exist.

    Args:
        models: All evaluated models, including the merge and possibly releases.
        parents: Parents that 'best parent' chooses from. None means all.
    """
    names = tuple(models)
    if guard.guarded_by == BEST_PARENT:
        return tuple(name for name in names if name not in (merged, *RELEASES) and (parents is None or name in parents))
    return (guard.guarded_by,) if guard.guarded_by in names else ()


def best_model(scores: Mapping[str, Sequence[float]], higher_is_better: bool) -> str:
    """Return the model with the best mean; ties go to the first in the mapping."""
    sign = 1.0 if higher_is_better else -1.0
    return max(scores, key=lambda name: sign * sum(scores[name]) / len(scores[name]))
