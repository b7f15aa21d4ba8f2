"""What a guard is compared with: a parent by name, the best parent on its task, or the champion (the release of today).

``best parent`` is chosen on the same documents that judge the merge, which flatters it: of several equally good parents
the luckiest is taken (winner's curse). That makes passing no easier, since no parent scored above the chosen one. An
alarm it would make too easy; so there the guard counts as one question per parent (see ``tasks.gate.regression``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from merge_core.errors import InvalidInput, suggest
from tasks.gate.guards import BEST_PARENT, CHAMPION, Guard


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
        if guard.guarded_by in (BEST_PARENT, CHAMPION):
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


def needs_champion(guards: Iterable[Guard]) -> bool:
    """Whether any guard asks for the release that is published today."""
    return any(guard.guarded_by == CHAMPION for guard in guards)


def reference_models(guard: Guard, models: Iterable[str], merged: str) -> tuple[str, ...]:
    """Models that the guard may be compared with: one, or every parent. Empty for a champion that there is not.

    Args:
        models: All that have been evaluated, the merge and perhaps the champion among them.
    """
    known = tuple(models)
    if guard.guarded_by == BEST_PARENT:
        return tuple(name for name in known if name not in (merged, CHAMPION))
    return (guard.guarded_by,) if guard.guarded_by in known else ()


def best_model(scores: Mapping[str, Sequence[float]], higher_is_better: bool) -> str:
    """The model with the best mean; of equals the first in the order given."""
    sign = 1.0 if higher_is_better else -1.0
    return max(scores, key=lambda name: sign * sum(scores[name]) / len(scores[name]))
