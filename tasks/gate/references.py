"""What a guard is compared with: a parent by name, the best parent on its task, the champion (the release of today), or
an anchor (a release that stays what it is, however many nights have followed).

``best parent`` is chosen on the same documents that judge the merge, which flatters it: of several equally good parents
the luckiest is taken (winner's curse). That makes passing no easier, since no parent scored above the chosen one. An
alarm it would make too easy; so there the guard counts as one question per parent (see ``tasks.gate.regression``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.gate.guards import ALL_PARENTS, ANCHOR, BEST_PARENT, CHAMPION, FINE_TUNES, RELEASES, Guard


def check_guards(guards: Iterable[Guard], names: Iterable[str]) -> None:
    """See that every guard is compared with something that there is, or may be there when it is judged.

    Args:
        names: Of the parents.

    Raises:
        InvalidInput: naming the first that is not, with a suggestion; or a parent whose name already means something.
    """
    parents = sorted(names)
    for position, guard in enumerate(guards):
        where = f"evaluate.tasks[{position}].guarded_by"
        if guard.guarded_by in (BEST_PARENT, *RELEASES):
            if guard.guarded_by in parents:
                raise InvalidInput(
                    where,
                    found=f"{guard.guarded_by!r}, which is also the name of a parent",
                    expected="one meaning",
                    remedy="rename the parent's directory",
                )
        elif guard.guarded_by not in parents:
            raise InvalidInput(
                where,
                found=f"{guard.guarded_by!r}, which is no model of this merge",
                expected=f"the name of a parent, {BEST_PARENT!r} or {CHAMPION!r}",
                remedy=suggest(guard.guarded_by, [*parents, BEST_PARENT, CHAMPION]),
            )


def comparable_parents(
    reference: str | Sequence[str], parents: Sequence[str], merged: Collection[str], where: str
) -> tuple[str, ...]:
    """The parents that the best one is chosen from, in their order.

    Args:
        reference: 'fine-tunes', 'all', one name or several.
        parents: All of them.
        merged: Those whose weights are merged: a base that task vectors are only measured from is none, and no merge
            has to be better at everything than the text that it was fine-tuned on made it.
        where: The setting, for messages.

    Raises:
        InvalidInput: for a name that no parent has.
    """
    if reference == ALL_PARENTS:
        return tuple(parents)
    if reference == FINE_TUNES:
        return tuple(name for name in parents if name in merged) or tuple(parents)
    names = (reference,) if isinstance(reference, str) else tuple(reference)
    for name in names:
        if name not in parents:
            raise InvalidInput(
                where,
                found=f"{name!r}, which is no model of this merge",
                expected=f"{FINE_TUNES!r}, {ALL_PARENTS!r}, or names of parents",
                remedy=suggest(name, [*parents, FINE_TUNES, ALL_PARENTS]),
            )
    return tuple(name for name in parents if name in names)


def needs_champion(guards: Iterable[Guard]) -> bool:
    """Whether any guard asks for the release that is published today."""
    return any(guard.guarded_by == CHAMPION for guard in guards)


def distinct_guards(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """Each guard once, in its order; one with a metric by task cannot be a key."""
    found: list[Guard] = []
    for guard in guards:
        if guard not in found:
            found.append(guard)
    return tuple(found)


def with_anchor(guards: Iterable[Guard], anchor: str | None) -> tuple[Guard, ...]:
    """The guards, and of each that compares with the champion another one that compares with the anchor, if there is
    one: tonight may lose a little against yesterday, but all nights together not more than one may."""
    held = tuple(guards)
    if anchor is None:
        return held
    against = (one.model_copy(update={"guarded_by": ANCHOR}) for one in held if one.guarded_by == CHAMPION)
    return distinct_guards((*held, *against))


def reference_models(
    guard: Guard, models: Iterable[str], merged: str, parents: Collection[str] | None = None
) -> tuple[str, ...]:
    """Models that the guard may be compared with: one, or several parents. Empty for a release that there is not.

    Args:
        models: All that have been evaluated, the merge and perhaps releases among them.
        parents: That the best one is chosen from; None: all.
    """
    known = tuple(models)
    if guard.guarded_by == BEST_PARENT:
        return tuple(name for name in known if name not in (merged, *RELEASES) and (parents is None or name in parents))
    return (guard.guarded_by,) if guard.guarded_by in known else ()


def best_model(scores: Mapping[str, Sequence[float]], higher_is_better: bool) -> str:
    """The model with the best mean; of equals the first in the order given."""
    sign = 1.0 if higher_is_better else -1.0
    return max(scores, key=lambda name: sign * sum(scores[name]) / len(scores[name]))
