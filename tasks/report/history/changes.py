"""What changed since the last night of the same profile: sentences for the first lines of a report.

Two nights are compared in what decides a release: how it ended, the version, the parents, the recipe, what is allowed,
what was scored. A night that a check refused knows neither parents nor scores; those are compared with the last one
that does.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Sequence

from mergegate.tasks.report import wording
from mergegate.tasks.report.history.record import RunRecord, RunScore

_MOST = 5  # of one kind: whoever wants all of it has the tables


def previous_of(records: Sequence[RunRecord], record: RunRecord) -> RunRecord | None:
    """The run of the same profile and flow before ``record``, which may stand in ``records`` or be new."""
    before = records[: records.index(record)] if record in records else records
    return next((one for one in reversed(before) if _same(one, record)), None)


def changes_since(records: Sequence[RunRecord], record: RunRecord) -> tuple[str, ...]:
    """Sentences, the most important first.

    Args:
        records: In the order in which they ended.
        record: Another run, or one of them; what came after it does not count.
    """
    before = records[: records.index(record)] if record in records else records
    nights = [one for one in before if _same(one, record)]
    if not nights:
        return ("The first run of this profile that is known here.",)
    last = nights[-1]
    said = [_ending(last, record)]
    version = next((one.version for one in reversed(nights) if one.version), None)
    if version and record.version and version != record.version:
        said.append(f"Version {version} → {record.version}.")
    knowing = next((one for one in reversed(nights) if one.parents), None)
    if knowing is None or not record.parents:
        return tuple(said)
    found = [
        *_of_parents(knowing, record),
        *_of_recipe(knowing.recipe, record.recipe),
        *_of_limits(knowing, record),
        *_of_scores(knowing, record),
    ]
    since = "" if knowing is last else f" since {format_run_time(knowing)}, when parents and scores were last known"
    return (*said, *found) if found else (*said, f"Parents, recipe, limits and scores are the same{since}.")


def format_run_time(record: RunRecord) -> str:
    """``2026-11-21 03:00``, in this machine's time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(record.ended))
    except (OverflowError, ValueError, OSError):  # a clock that was years away
        return "at no known time"


def _same(one: RunRecord, other: RunRecord) -> bool:
    return (one.profile, one.flow) == (other.profile, other.flow)


def _ending(last: RunRecord, now: RunRecord) -> str:
    if last.status != now.status:
        verb = "found" if last.status == "nothing new" else "was"
        return f"{now.status.capitalize()}; the run before, {format_run_time(last)}, {verb} {last.status}."
    if last.message != now.message and now.status in ("refused", "invalid", "failed"):
        return f"{now.status.capitalize()} like the run before, {format_run_time(last)}, but for another reason."
    return f"{now.status.capitalize()} like the run before, {format_run_time(last)}."


def _of_parents(last: RunRecord, now: RunRecord) -> list[str]:
    before, after = ({one.name: one for one in each.parents} for each in (last, now))
    said = [f"{name} is a new parent." for name in after if name not in before]
    said += [f"{name} is no parent any more." for name in before if name not in after]
    for name, parent in after.items():
        old = before.get(name)
        if old is None or old.digest == parent.digest:
            continue
        if old.revision and parent.revision and old.revision != parent.revision:
            said.append(f"{name}: revision {old.revision[:10]} → {parent.revision[:10]}.")
        else:
            said.append(f"{name} has other files than before: {old.digest[:10]} → {parent.digest[:10]}.")
    return _few(said, "parents")


def _of_recipe(before: str, after: str) -> list[str]:
    if before == after:
        return []
    lines = [
        line
        for line in difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].partition("#")[0].strip()
    ]
    old, new = ([line[1:].strip() for line in lines if line[0] == sign] for sign in "-+")
    if len(old) == len(new) == 1:
        return [f"Recipe: {old[0]} → {new[0]}."]
    shown = [f"{'without' if line[0] == '-' else 'with'} {line[1:].strip()}" for line in lines]
    more = f" and {len(shown) - 4} more lines" if len(shown) > 4 else ""
    return [f"Recipe: {', '.join(shown[:4])}{more}."] if shown else ["Recipe: written otherwise."]


def _of_limits(last: RunRecord, now: RunRecord) -> list[str]:
    before, after = (_by_guard(each.scores) for each in (last, now))
    said = [
        f"{task}: limit {before[task, reference].limit} → {score.limit}."
        for (task, reference), score in after.items()
        if (task, reference) in before and before[task, reference].limit != score.limit
    ]
    said += [
        f"{task} is guarded now, against {reference}." for task, reference in after if (task, reference) not in before
    ]
    # A run that was decided early has asked less: only one that ended well has asked everything.
    if now.status in ("released", "passed", "nothing new"):
        said += [
            f"{task} is not guarded against {reference} any more."
            for task, reference in before
            if (task, reference) not in after
        ]
    limits = (last.perplexity_limit, now.perplexity_limit)
    if None not in limits and limits[0] != limits[1]:
        said.append(f"Perplexity: limit {_ratio(limits[0])} → {_ratio(limits[1])}.")
    return _few(said, "limits")


def _of_scores(last: RunRecord, now: RunRecord) -> list[str]:
    before = _by_guard(last.scores)
    moved = []
    for guard, score in _by_guard(now.scores).items():
        old = before.get(guard)
        if old is not None and (_score(old), f"{old.drop:.1f}") != (_score(score), f"{score.drop:.1f}"):
            how_far = max(abs((score.merge or 0.0) - (old.merge or 0.0)), abs(score.drop - old.drop))
            moved.append((how_far, _moved(old, score)))
    moved.sort(key=lambda one: -one[0])
    said = [sentence for _, sentence in moved]
    ratios = (last.perplexity, now.perplexity)
    if ratios[0] is not None and ratios[1] is not None and _ratio(ratios[0]) != _ratio(ratios[1]):
        said.append(f"Perplexity {_ratio(ratios[0])} → {_ratio(ratios[1])} of the better parent's.")
    return _few(said, "scores")


def _moved(old: RunScore, new: RunScore) -> str:
    drop = f"drop against {new.reference} {wording.number(old.drop, 1)} → {wording.number(new.drop, 1)}"
    scores = _score(old), _score(new)
    if not all(scores):
        return f"{new.task}: {drop}."
    return f"{new.task}: scores {' → '.join(dict.fromkeys(scores))}, {drop}."


def _score(score: RunScore) -> str:
    return "" if score.merge is None else wording.number(score.merge, 1)


def _by_guard(scores: Iterable[RunScore]) -> dict[tuple[str, str], RunScore]:
    return {(one.task, one.reference): one for one in scores}


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _few(said: list[str], what: str) -> list[str]:
    return said if len(said) <= _MOST else [*said[:_MOST], f"{len(said) - _MOST} more {what} changed."]
