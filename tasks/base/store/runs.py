"""Record which artifacts each run uses, so that garbage collection keeps them, and decide which runs count.

::

    with open_run(runs, run_id, "release", "support-assistant") as run:
        record_use(runs, run_id, "merge", key, "")     # before any process of the run opens the artifact
        run.end("released", judged=True)
    forget_runs(runs)                                  # delete the records of runs that no longer count

The record of a run is the file ``<runs>/<id>.jsonl`` with one line for each use. The process of the run holds a shared
lock on the file, which the kernel releases when the process ends. The record of a killed run stays, because the next
run resumes its work. Each line is appended in one call and never changed. The file is not flushed to the disk. If a
power cut loses a line, garbage collection may remove that artifact, and the next run builds it again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.files import Damaged, lock_file, read_state, remove_damaged, state_directory, try_open_locked

# Number of recent runs to keep for each profile. With two, one failed run does not discard the results before it.
LAST_RUNS = 2
RELEASED = "released"
_SUFFIX = ".jsonl"
_KEY_DIGITS = 32  # Number of hex digits of a key in the name of its artifact.
_RUN = re.compile("[A-Za-z0-9_-]{1,100}")


class EntryName(NamedTuple):
    """Stage of an entry and the first 32 hex digits of its key."""

    stage: str
    key: str


@dataclass(frozen=True)
class RunUse:
    """A run and the entries that it requested from the store."""

    run: str
    flow: str
    profile: str  # Name of the profile, or an empty string for a run without one.
    started: float  # Start time in seconds since the epoch.
    status: str  # Final status, or an empty string if the run is in progress or was killed.
    judged: bool  # Whether the run got far enough that the next run of the profile will need the same entries.
    is_live: bool  # Whether the run is in progress.
    # For each entry that the run used, the subject that the run recorded for it, such as a model, or an empty string.
    used: Mapping[EntryName, str]
    bytes_created: int = 0  # Total size in bytes of the artifacts that the run created.


@dataclass
class OpenRun:
    """Run in progress. Its process holds a lock on the record ``file``, which tells other processes that it runs."""

    file: Path

    def end(self, status: str, *, judged: bool) -> None:
        """Record how the run ended. Without this record, the run counts as killed.

        Args:
            status: Status to display. ``released`` marks the run that published the champion.
            judged: Whether the run got far enough that the next run of the profile will need the same entries.
        """
        _append(self.file, {"ended": time.time(), "status": status, "judged": judged})


@contextmanager
def open_run(runs: Path, run: str, flow: str, profile: str) -> Iterator[OpenRun]:
    """Register a run for the duration of the block. A resumed run continues its earlier record.

    Args:
        runs: Directory of the run records, created if it is missing.
        run: ID of the run: letters, digits, dashes and underscores.
        flow: Name of the flow.
        profile: Name of the profile. If it is empty, the record is deleted at the end of the block.
    """
    assert _RUN.fullmatch(run), run
    state_directory(runs, private=True)
    file = runs / f"{run}{_SUFFIX}"
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        if lock_file(descriptor, file, shared=True, required=False):  # marks the run as in progress
            break
        os.close(descriptor)  # Another process has just deleted this record.
    try:
        # A line that a kill left incomplete must not swallow this one.
        _append(file, {"run": run, "flow": flow, "profile": profile, "started": time.time()}, prefix=b"\n")
        yield OpenRun(file)
    finally:
        try:
            if not profile:
                file.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def record_use(runs: Path, run: str, stage: str, key: str, subject: str) -> bool:
    """Record that a run is about to use an artifact. Return False if the run is not registered.

    Call this before opening the artifact. Otherwise, garbage collection may remove the artifact in between.
    """
    try:
        _append(runs / f"{run}{_SUFFIX}", {"stage": stage, "key": key[:_KEY_DIGITS], "subject": subject})
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def record_created(runs: Path, run: str, size: int) -> None:
    """Record that a run created an artifact of ``size`` bytes. Do nothing if the run is not registered."""
    with suppress(FileNotFoundError, NotADirectoryError):
        _append(runs / f"{run}{_SUFFIX}", {"made": size})


def read_runs(runs: Path, run: str = "*") -> tuple[RunUse, ...]:
    """Return the records of all runs, in progress or ended, or only that of ``run``. Skip unreadable records."""
    return RunReader(runs, run).read()


def runs_that_count(runs: Iterable[RunUse]) -> dict[str, str]:
    """Return the runs whose entries must be kept, as a dict from run ID to reason.

    For each flow and profile, these are the runs in progress; the last run, even if it was killed, because the next run
    resumes it; the last two judged runs; and the last run that published, because its merge is the champion.
    """
    by_profile: dict[tuple[str, str], list[RunUse]] = defaultdict(list)
    for run in runs:
        by_profile[run.flow, run.profile].append(run)
    counting: dict[str, str] = {}
    for (_, profile), group in sorted(by_profile.items()):
        group.sort(key=lambda run: (run.started, run.run))
        if profile:
            judged = [run for run in group if run.judged]
            for run in (*judged[-LAST_RUNS:], group[-1]):
                counting[run.run] = f"last runs of {profile}"
            for run in [run for run in judged if run.status == RELEASED][-1:]:
                counting[run.run] = f"release of {profile}"
        for run in group:
            if run.is_live:
                counting[run.run] = f"in use by a run of {profile}" if profile else "in use"
    return counting


def forget_runs(runs: Path, profile: str | None = None) -> int:
    """Delete the records of all ended runs of ``profile``, and return how many were deleted.

    Without ``profile``, delete the records of ended runs that no longer count (see :func:`runs_that_count`).
    """
    records = read_runs(runs)
    if profile is None:
        run_ids = {record.run for record in records} - set(runs_that_count(records))
    else:
        run_ids = {record.run for record in records if record.profile == profile}
    deleted = 0
    for run in sorted(run_ids):
        file = runs / f"{run}{_SUFFIX}"
        with suppress(FileNotFoundError):
            descriptor = try_open_locked(file, os.O_RDONLY, required=False)
            if descriptor is not None:  # None: the run is in progress.
                file.unlink()
                os.close(descriptor)
                deleted += 1
    return deleted


class RunReader:
    """Reader of run records that parses only the files that changed since its last call."""

    def __init__(self, runs: Path, run: str = "*") -> None:
        self._runs, self._pattern = runs, f"{run}{_SUFFIX}"
        self._parsed: dict[Path, tuple[tuple[int, int, int], RunUse | None]] = {}

    def read(self) -> tuple[RunUse, ...]:
        """Return the records of all runs, the oldest run first."""
        files = sorted(self._runs.glob(self._pattern)) if self._runs.is_dir() else []
        records = [record for file in files if (record := self._read(file)) is not None]
        return tuple(sorted(records, key=lambda record: (record.started, record.run)))

    def _read(self, file: Path) -> RunUse | None:
        # Check this before reading, so that a run that ends in between is read with its last line.
        is_live = _is_live(file)
        try:
            status = file.lstat()
        except OSError:
            return None
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        parsed_state, run = self._parsed.get(file, (None, None))
        if parsed_state != state:
            record = read_state(file, _parse)
            if isinstance(record, Damaged):
                if not is_live:
                    remove_damaged(file, record.reason)
                return None
            run = record
            self._parsed[file] = (state, run)
        return run and replace(run, is_live=is_live)


def _parse(content: bytes) -> RunUse:
    header: dict[str, Any] = {}
    end: dict[str, Any] = {}
    used: dict[EntryName, str] = {}
    bytes_created = 0
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # A kill may leave an incomplete line.
            continue
        match line:
            case {"run": _}:
                header = {**line, **header}  # Keep the time of the first start.
                end = {}  # The run was suspended and continues.
            case {"ended": _}:
                end = line
            case {"made": int(size)}:
                bytes_created += size
            case {"stage": str(stage), "key": str(key)}:
                name = EntryName(stage, key)
                used[name] = str(line.get("subject") or used.get(name, ""))
    return RunUse(
        run=str(header["run"]),
        flow=str(header["flow"]),
        profile=str(header["profile"]),
        started=float(header["started"]),
        status=str(end.get("status", "")),
        judged=end.get("judged") is True,
        is_live=False,
        used=used,
        bytes_created=bytes_created,
    )


def _append(file: Path, line: Mapping[str, object], prefix: bytes = b"") -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.write(descriptor, prefix + json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def _is_live(file: Path) -> bool:
    if file.is_symlink() or not file.is_file():  # Damaged. Opening a pipe would block.
        return False
    try:
        descriptor = try_open_locked(file, os.O_RDONLY, required=False)
    except FileNotFoundError:
        return False
    except OSError:  # Unknown, so keep the record.
        return True
    if descriptor is None:
        return True
    os.close(descriptor)
    return False
