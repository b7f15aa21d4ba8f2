"""Describe what changed since the last run of the same profile, in sentences for the top of a report.

Two runs are compared in everything that decides a release: outcome, version, parents, recipe, limits and scores. The
parents and scores are compared with the last run that has them, because a run that a check refused has neither.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Sequence

from mergegate.merge_core.recipe import RunWindow
from mergegate.merge_core.wording import format_count
from mergegate.tasks.report import wording
from mergegate.tasks.report.history.record import RunRecord, RunScore

_MAX_SENTENCES = 5  # per kind of change; the tables show all of them
# Lines of a recipe that a training run determines: the remarks about its window, and its checkpoints.
_RUN_LINES = re.compile(r"(?m)^(?:#.*|models:(?:\n[ -].*)*)\n?")


def earlier_runs(records: Sequence[RunRecord], record: RunRecord) -> list[RunRecord]:
    """Return the runs of the same profile and flow before ``record``, oldest first. ``record`` may be new."""
    before = records[: records.index(record)] if record in records else records
    return [run for run in before if (run.profile, run.flow) == (record.profile, record.flow)]


def changes_since(records: Sequence[RunRecord], record: RunRecord) -> tuple[str, ...]:
    """Return sentences about the changes since the previous run, the most important first.

    Args:
        records: Runs in the order in which they ended.
        record: A new run or one of ``records``. Runs after it are ignored.
    """
    runs = earlier_runs(records, record)
    if not runs:
        return ("This is the first recorded run of this profile.",)
    last, previous = runs[-1], f"the previous run ({format_run_time(runs[-1])})"
    if last.status != record.status:
        verb = "found" if last.status == "nothing new" else "ended with" if last.status == "failed" else "was"
        result = "an error" if last.status == "failed" else last.status
        sentences = [f"{previous[0].upper()}{previous[1:]} {verb} {result}."]
    else:
        reason = ""
        if last.message != record.message and record.status in ("refused", "invalid", "failed"):
            reason = ", but for a different reason"
        status = "Error" if record.status == "failed" else record.status.capitalize()
        sentences = [f"{status}, as in {previous}{reason}."]
    version = next((run.version for run in reversed(runs) if run.version), None)
    if version and record.version and version != record.version:
        sentences.append(f"Version {version} → {record.version}.")
    reference = next((run for run in reversed(runs) if run.parents), None)
    if reference is None or not record.parents:
        return tuple(sentences)
    changes = _content_changes(reference, record)
    since = "" if reference is last else f" since {format_run_time(reference)}, the last run that has scores"
    return (*sentences, *(changes or [f"Parents, recipe, limits and scores are unchanged{since}."]))


def format_run_time(record: RunRecord) -> str:
    """Return the end of a run in this machine's time zone: ``2026-11-21 03:00``."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(record.ended))
    except (OverflowError, ValueError, OSError):  # the clock was off by years
        return "unknown time"


def _content_changes(last: RunRecord, now: RunRecord) -> list[str]:
    """Return sentences about changes in parents, recipe, limits, scores and variants, in this order."""
    # One sentence for each training run covers its checkpoints, their weights, and the name of the last one.
    same_runs = len(last.windows) == len(now.windows)
    windows = tuple(zip(last.windows, now.windows, strict=True)) if same_runs else ()
    covered = {name for pair in windows for window in pair for name in window.checkpoints}
    renamed = {old.checkpoints[-1]: new.checkpoints[-1] for old, new in windows}
    before, after = ({item.name: item for item in run.parents} for run in (last, now))
    sentences = [f"Training run: {_window_change(*pair)}." for pair in windows if pair[0] != pair[1]]
    sentences += [f"Parent {name} was added." for name in after if name not in before and name not in covered]
    sentences += [f"Parent {name} was removed." for name in before if name not in after and name not in covered]
    for name, parent in after.items():
        old = before.get(name)
        if old is None or old.digest == parent.digest:
            continue
        if old.revision and parent.revision and old.revision != parent.revision:
            sentences.append(f"Parent {name}: revision {old.revision[:10]} → {parent.revision[:10]}.")
        else:
            sentences.append(f"Parent {name}: its files changed, digest {old.digest[:10]} → {parent.digest[:10]}.")
    changes = _limited(sentences, "parents")

    old_recipe, new_recipe = (_RUN_LINES.sub("", run.recipe) if windows else run.recipe for run in (last, now))
    if old_recipe != new_recipe:
        sentences = [f"Recipe: {change}." for change in _recipe_changes(old_recipe, new_recipe)]
        changes += _limited(sentences, "recipe lines") or ["Recipe: only comments or the layout changed."]

    guards = {(score.task, score.reference): score for score in now.scores}
    guards_before = {}
    for score in last.scores:
        guard = (score.task, score.reference)
        guards_before[guard if guard in guards else (score.task, renamed.get(score.reference, score.reference))] = score
    sentences = [
        f"{guard[0]}: {_limits(guards_before[guard])} → {_limits(score)}."
        for guard, score in guards.items()
        if guard in guards_before and guards_before[guard].limit != score.limit
    ]
    sentences += [
        f"{task}: new guard, with {reference} as the reference."
        for task, reference in guards
        if (task, reference) not in guards_before
    ]
    # A run that was decided early evaluated fewer tasks. Only a successful run evaluated all of them.
    if now.status in ("released", "passed", "nothing new"):
        sentences += [
            f"{task}: the guard with {reference} as the reference was removed."
            for task, reference in guards_before
            if (task, reference) not in guards
        ]
    limits = (last.perplexity_limit, now.perplexity_limit)
    if None not in limits and limits[0] != limits[1]:
        sentences.append(f"Perplexity: limit of the ratio {_ratio(limits[0])} → {_ratio(limits[1])}.")
    changes += _limited(sentences, "limits")

    by_size = []
    for guard, new in guards.items():
        if guard not in guards_before:
            continue
        old_score = guards_before[guard]
        points = ["" if score.merge is None else wording.number(score.merge, 1) for score in (old_score, new)]
        if points[0] == points[1] and f"{old_score.drop:.1f}" == f"{new.drop:.1f}":
            continue
        drop = f"drop {wording.number(old_score.drop, 1)} → {wording.number(new.drop, 1)} (reference {new.reference})"
        text = f"score {' → '.join(dict.fromkeys(points))}, {drop}" if all(points) else drop
        size = max(abs((new.merge or 0.0) - (old_score.merge or 0.0)), abs(new.drop - old_score.drop))
        by_size.append((size, f"{new.task}: {text}."))
    sentences = [sentence for _, sentence in sorted(by_size, key=lambda change: -change[0])]
    ratios = (last.perplexity, now.perplexity)
    if ratios[0] is not None and ratios[1] is not None and _ratio(ratios[0]) != _ratio(ratios[1]):
        sentences.append(f"Perplexity: ratio to the better parent {_ratio(ratios[0])} → {_ratio(ratios[1])}.")
    changes += _limited(sentences, "scores")

    variants_before, variants = ({variant.type: variant for variant in run.variants} for run in (last, now))
    sentences = [
        f"Variant {name}: {variants_before[name].outcome} → {variant.outcome}."
        for name, variant in variants.items()
        if name in variants_before and variants_before[name].outcome != variant.outcome
    ]
    sentences += [
        f"Variant {name} was added: {variants[name].outcome}." for name in variants if name not in variants_before
    ]
    if variants:  # a refused merge has no variants, which says nothing about the profile
        sentences += [f"Variant {name} was removed." for name in variants_before if name not in variants]
    return changes + _limited(sentences, "variants")


def _window_change(old: RunWindow, new: RunWindow) -> str:
    """Return the changes of a window: ``steps 225 to 400 → 425 to 600``."""
    counts = [format_count(len(window.checkpoints), "checkpoint") for window in (old, new)]
    changes = [(old.steps, new.steps), (counts[0], counts[1]), (f"{old.schedule} weights", f"{new.schedule} weights")]
    texts = [f"{before} → {after}" for before, after in changes if before != after]
    return ", ".join(texts) or "other checkpoints of the same steps"


def _recipe_changes(before: str, after: str) -> list[str]:
    """Return the changed lines of a recipe: 'density: 0.5 → 0.3', 'lambda: 1 was added', 'lambda: 1 was removed'."""
    old_lines, new_lines = before.splitlines(), after.splitlines()
    changes = []
    matcher = difflib.SequenceMatcher(None, old_lines, new_lines, autojunk=False)
    for kind, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if kind == "equal":
            continue
        removed, added = (
            [line.strip() for line in lines if line.partition("#")[0].strip()]
            for lines in (old_lines[old_start:old_end], new_lines[new_start:new_end])
        )
        for line in removed:
            key, colon, value = line.partition(":")
            successor = next((new for new in added if new.partition(":")[0] == key), None)
            if successor is None:
                changes.append(f"{line} was removed")
                continue
            added.remove(successor)
            if successor != line:
                changes.append(f"{key}{colon}{value} →{successor.partition(':')[2]}")
        changes += [f"{line} was added" for line in added]
    return changes


def _limits(score: RunScore) -> str:
    return f"max_drop {wording.plain(score.max_drop)}, margin {wording.plain(score.margin)}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _limited(sentences: list[str], subject: str) -> list[str]:
    return (
        sentences
        if len(sentences) <= _MAX_SENTENCES
        else [*sentences[:_MAX_SENTENCES], f"{len(sentences) - _MAX_SENTENCES} more {subject} changed."]
    )
