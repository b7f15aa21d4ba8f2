"""Record each run as one line of ``history.jsonl``, and describe what changed since the last run of the same profile.

A record is a small frozen value that only informs users; no verdict depends on it. Text from user input (names,
messages) is untrusted: its length is limited here, and pages escape it. The order of runs is the order of lines, so it
does not depend on clocks.

Two runs are compared in everything that decides a release: outcome, version, parents, recipe, limits and scores. The
parents and scores are compared with the last run that has them, because a run that a check refused has neither.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import Status
from mergegate.merge_core.files import Damaged, hold_lock, read_state, write_state
from mergegate.merge_core.recipe import RunWindow
from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.release.report import wording

RunStatus = Status
HISTORY, LOCK = "history.jsonl", "history.lock"
# Runs per profile and flow: more than a year of nightly runs. Runs in total: enough for a directory that hundreds of
# profiles share.
MAX_PER_PROFILE, MAX_TOTAL = 400, 2000
_MAX_SENTENCES = 5  # per kind of change; the tables show all of them
# Lines of a recipe that a training run determines: the remarks about its window, and its checkpoints.
_RUN_LINES = re.compile(r"(?m)^(?:#.*|models:(?:\n[ -].*)*)\n?")
_GOOD_STATUSES = ("released", "nothing new", "passed", "promoted")
_BAD_STATUSES = ("refused", "invalid", "failed", "rolled back", "killed")
_log = logging.getLogger(__name__)
# Largest length of a message and of a recipe, in characters. The recipe is stored to list its changed lines.
_MAX_MESSAGE, _MAX_RECIPE = 2000, 6000


def _cut(length: int) -> AfterValidator:
    return AfterValidator(lambda text: text if len(text) <= length else f"{text[: length - 1]}…")


Short = Annotated[str, _cut(200)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _RecordPart(BaseModel):
    # A newer mergegate version may add fields. The known fields of its lines are still valid.
    model_config = ConfigDict(frozen=True, extra="ignore")


class RunStage(_RecordPart):
    """All calls of one stage in a run."""

    name: Short
    seconds: Finite = Field(ge=0)  # sum over all calls; parallel calls take less time in total
    calls: int = Field(ge=0)
    cached: int = Field(ge=0)  # number of calls whose artifact was in the store
    status: Short  # most severe status of all calls: made, cached, rebuilt, refused, failed


class RunScore(_RecordPart):
    """One guard: the merge against its reference on a task or a suite of tasks. Points are hundredths of a score."""

    task: Short
    reference: Short
    merge: Finite | None = None  # score in points; None for a suite, which only has a drop
    drop: Finite  # points below the reference; negative if the merge is better
    low: Finite
    high: Finite
    max_drop: Finite  # largest drop that the profile allows, in points
    margin: Finite
    outcome: Short
    # Number of documents that both were scored on; 0 for a suite and in records of older versions.
    documents: int = Field(default=0, ge=0)
    differing: int = Field(default=0, ge=0)  # number of these documents on which merge and reference differ

    @property
    def limit(self) -> str:
        """The limit as text: '3', or '3, margin 4' if the two differ."""
        margin = f", margin {wording.plain(self.margin)}" if self.margin != self.max_drop else ""
        return wording.plain(self.max_drop) + margin


class RunVariant(_RecordPart):
    """A quantized variant of the merge and its verdict."""

    type: Short  # 'Q8_0'
    outcome: Short
    published: bool  # whether its verdict allows publication
    drop: Finite | None = None  # mean drop of a suite, or else the largest drop, in points; None if not evaluated


class RunParent(_RecordPart):
    """A model that went into the merge."""

    name: Short
    ref: Short
    revision: Short | None = None
    digest: Short  # first digits of the digest of its files


class RunRecord(_RecordPart):
    """A run of a flow and its result."""

    run: Short  # id of the run; Prefect's id if Prefect ran it
    flow: Short  # release, compare, sweep
    profile: Short
    ended: Finite  # seconds since the epoch; the clock may be wrong, so runs are ordered by line instead
    seconds: Finite = Field(ge=0)  # duration, measured by a monotonic clock
    status: Short  # a RunStatus, or a status of a newer mergegate version
    message: Annotated[str, _cut(_MAX_MESSAGE)]
    overrides: tuple[Short, ...] = ()  # overrides of profile settings: KEY=VALUE
    version: Short | None = None
    method: Short = ""  # 'ties of 3 over llama-base'
    recipe: Annotated[str, _cut(_MAX_RECIPE)] = ""
    parents: tuple[RunParent, ...] = ()
    # Checkpoints of each training run, by name.
    windows: Annotated[tuple[RunWindow, ...], Field(exclude_if=lambda windows: not windows)] = ()
    scores: tuple[RunScore, ...] = ()
    variants: Annotated[tuple[RunVariant, ...], Field(exclude_if=lambda variants: not variants)] = ()
    perplexity: Finite | None = None  # perplexity of the merge over that of the better parent
    perplexity_limit: Finite | None = None
    stages: tuple[RunStage, ...] = ()
    bytes_made: int = Field(default=0, ge=0)  # size of the artifacts that were new in the store
    bytes_merged: int = Field(default=0, ge=0)  # size of the merged checkpoint
    location: Annotated[str, _cut(500)] = ""  # directory or address of the release
    machine: Short = ""  # 'build-7, 16 cores, Linux x86_64'
    seen_at: Annotated[str, _cut(500)] = ""  # page of the run on the Prefect server, if any
    report: Short = ""  # path of the page, relative to the directory of reports; empty if it could not be archived

    @property
    def why(self) -> str:
        """Reason for the status: the message's first line, or the second if the first only says "not released"."""
        first, *rest = self.message.splitlines() or [""]
        return rest[0].strip() if rest and first.endswith("is not released") else first

    def line(self) -> bytes:
        """Return the record as stored: JSON on one line."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), separators=(",", ":")).encode()


@dataclass(frozen=True)
class History:
    """Past runs of a project."""

    records: tuple[RunRecord, ...] = ()  # runs in the order in which they ended
    damaged: int = 0  # Number of lines that cannot be read. 1 if the file itself cannot be read.
    why: str = ""  # reason why the file cannot be read, or an empty string

    def runs_of(self, profile: str, flow: str) -> tuple[RunRecord, ...]:
        """Return the runs of a flow with a profile."""
        return tuple(record for record in self.records if (record.profile, record.flow) == (profile, flow))

    def damage_sentence(self) -> str:
        """Return a sentence that describes the damage, or an empty string if the history is intact."""
        if self.why:
            return f"The history cannot be read: {self.why}."
        return f"{format_count(self.damaged, 'damaged line')} of the history left out." if self.damaged else ""


def read_history(reports: Path) -> History:
    """Return the history in the directory of reports. It never raises: the result describes what cannot be read."""
    try:
        history = read_state(reports / HISTORY, _parse)
    except OSError as error:
        return History(damaged=1, why=error.strerror or str(error))
    if isinstance(history, Damaged):
        return History(damaged=1, why=history.reason)
    return history or History()


def append_record(reports: Path, history: History, record: RunRecord) -> History:
    """Add a run to the history, without damaged lines and old runs, and return the result.

    The caller must hold the lock and must have read ``history`` under it.
    """
    counts: Counter[tuple[str, str]] = Counter()
    newest_first: list[RunRecord] = []
    for item in reversed((*history.records, record)):
        counts[item.profile, item.flow] += 1
        if counts[item.profile, item.flow] <= MAX_PER_PROFILE and len(newest_first) < MAX_TOTAL:
            newest_first.append(item)
    if history.damaged:
        _log.warning("%s", history.damage_sentence())
    return _write(reports, tuple(reversed(newest_first)))


def mend_history(reports: Path) -> None:
    """Remove damaged lines from the history."""
    with hold_lock(reports / LOCK, required=False):
        _write(reports, read_history(reports).records)


def _write(reports: Path, records: tuple[RunRecord, ...]) -> History:
    write_state(reports / HISTORY, b"".join(record.line() + b"\n" for record in records))
    return History(records)


def _parse(content: bytes) -> History:
    records, damaged = [], 0
    for line in filter(None, content.split(b"\n")):
        try:
            records.append(RunRecord.model_validate(json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            damaged += 1
    return History(tuple(records), damaged)


def outcome_of_status(status: str) -> Outcome:
    """Return the outcome that a status stands for. An unknown status, from a newer mergegate, is inconclusive."""
    return "pass" if status in _GOOD_STATUSES else "fail" if status in _BAD_STATUSES else "inconclusive"


def status_word(status: str) -> str:
    """Return a status as pages show it. ``failed`` is an error of the program or its environment, not a verdict."""
    return "error" if status == "failed" else status


def worst_drop(record: RunRecord) -> RunScore | None:
    """Return the score of the guard with the largest drop, or None without scores."""
    return max(record.scores, key=lambda score: score.drop, default=None)


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
    if len(sentences) <= _MAX_SENTENCES:
        return sentences
    return [*sentences[:_MAX_SENTENCES], f"{len(sentences) - _MAX_SENTENCES} more {subject} changed."]
