"""What each run used of the store: a lease while it runs, and afterwards the record that keeps its artifacts.

::

    with open_run(runs, run_id, "release", "support-assistant") as run:
        note_use(runs, run_id, "merge", key, "")       # before the store is asked for it, by any process of the run
        run.end("released", judged=True)
    prune_runs(runs)                                   # of each profile, the runs that count stay

A run is a file ``<runs>/<id>.jsonl`` with a line for each use. While its process lives it holds a shared lock on the
file, which the kernel drops with it: nobody has to tidy up after a killed run, and its record stays, because the next
run goes on from what it has made. A line is appended in one call and never changed. None of it is flushed: what a
power cut takes is a line less, so an artifact more that may go, and that is made again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergegate.merge_core.files import (
    Damaged,
    lock_file,
    read_state,
    set_aside_damaged,
    state_directory,
    try_open_locked,
)
from mergegate.tasks.store.retention import EntryName, RunUse, runs_that_count

_SUFFIX = ".jsonl"
_NAMED = 32  # hex digits of a key that name its artifact
_KEY = re.compile("[0-9a-f]{32}")
_RUN = re.compile("[A-Za-z0-9_-]{1,100}")


@dataclass
class OpenRun:
    """A run that goes on; others see that by the lock."""

    file: Path

    def end(self, status: str, *, judged: bool) -> None:
        """Note how it ended. Without it, the run counts as killed.

        Args:
            status: For a person; ``released`` makes it the champion's run.
            judged: Whether it got so far that it tells what the next run will need.
        """
        _append(self.file, {"ended": time.time(), "status": status, "judged": judged})


@contextmanager
def open_run(runs: Path, run: str, flow: str, profile: str) -> Iterator[OpenRun]:
    """Register a run for as long as the block takes. One that was suspended goes on with its record.

    Args:
        runs: Directory; made if it is absent.
        run: Names it: letters, digits, dashes.
        flow: What kind of run.
        profile: Of whom it is the last run; empty: of nobody, so that nothing is kept for it afterwards.
    """
    assert _RUN.fullmatch(run), run
    state_directory(runs, private=True)
    file = runs / f"{run}{_SUFFIX}"
    descriptor = _opened(file)
    try:
        # A line that a kill has torn must not swallow this one.
        _append(file, {"run": run, "flow": flow, "profile": profile, "started": time.time()}, before=b"\n")
        yield OpenRun(file)
    finally:
        try:
            if not profile:
                file.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def record_use(runs: Path, run: str, stage: str, key: str, subject: str) -> bool:
    """Note that a run is about to use an artifact; False where no such run is registered.

    To be called before the store is asked: whoever collects looks at the notes after it has moved something away.
    """
    try:
        _append(runs / f"{run}{_SUFFIX}", {"stage": stage, "key": key[:_NAMED], "subject": subject})
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def record_created(runs: Path, run: str, size: int) -> None:
    """Note that a run has made an artifact of so many bytes; nothing where no such run is registered."""
    with suppress(FileNotFoundError, NotADirectoryError):
        _append(runs / f"{run}{_SUFFIX}", {"made": size})


def read_run(runs: Path, run: str) -> RunUse | None:
    """What one run has noted so far; None where nothing is known of it, or it cannot be read."""
    found = read_state(runs / f"{run}{_SUFFIX}", _parsed)
    return None if isinstance(found, Damaged) else found


def read_runs(runs: Path) -> tuple[RunUse, ...]:
    """All runs that are registered, going on or over. What cannot be read is passed over."""
    return RunReader(runs).read()


def prune_runs(runs: Path) -> None:
    """Forget the runs that do not count any more: see :func:`tasks.store.retention.runs_that_count`."""
    known = read_runs(runs)
    _forget(runs, {one.run for one in known} - set(runs_that_count(known)))


def forget_profile(runs: Path, profile: str) -> int:
    """Forget all runs of a profile that is not run any more; how many there were. Runs that go on stay."""
    return _forget(runs, {one.run for one in read_runs(runs) if one.profile == profile})


class RunReader:
    """Reads the records of runs, again and again: only what has changed since."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._known: dict[Path, tuple[tuple[int, int, int], RunUse | None]] = {}

    def read(self) -> tuple[RunUse, ...]:
        """As of now."""
        files = sorted(self._runs.glob(f"*{_SUFFIX}")) if self._runs.is_dir() else []
        found = [one for file in files if (one := self._read(file)) is not None]
        return tuple(sorted(found, key=lambda one: (one.started, one.run)))

    def _read(self, file: Path) -> RunUse | None:
        # Whether it goes on is asked first: what it notes before it ends is then among the lines.
        live = _is_live(file)
        try:
            status = file.lstat()
        except OSError:
            return None
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        before, run = self._known.get(file, (None, None))
        if before != state:
            found = read_state(file, _parsed)
            if isinstance(found, Damaged):
                if not live:
                    set_aside_damaged(file, found.why)
                return None
            run = found
            self._known[file] = (state, run)
        return run and run.with_life(live)


@dataclass
class _Lines:
    """What the lines of a record say, as they are read."""

    header: dict[str, Any] = field(default_factory=dict)
    used: dict[EntryName, str] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    made: int = 0

    def take(self, line: Mapping[str, Any]) -> None:
        if isinstance(line.get("run"), str):
            self.header = {**line, **self.header}  # the first start counts
            self.end = {}  # it was suspended, and goes on
        elif "ended" in line:
            self.end = dict(line)
        elif isinstance(line.get("made"), int):
            self.made += max(0, line["made"])
        elif isinstance(line.get("stage"), str) and _KEY.fullmatch(str(line.get("key"))):
            name = EntryName(line["stage"], line["key"])
            self.used[name] = str(line.get("subject") or self.used.get(name, ""))


def _parsed(content: bytes) -> RunUse:
    lines = _Lines()
    for text in content.splitlines():
        with suppress(ValueError):  # torn by a kill
            line = json.loads(text)
            if isinstance(line, dict):
                lines.take(line)
    header, end = lines.header, lines.end
    return RunUse(
        run=str(header["run"]),
        flow=str(header["flow"]),
        profile=str(header["profile"]),
        started=float(header["started"]),
        status=str(end.get("status", "")),
        judged=end.get("judged") is True,
        live=False,
        used=lines.used,
        made=lines.made,
    )


def _opened(file: Path) -> int:
    """The record, open, with a lock that says that its run goes on."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        if lock_file(descriptor, file, shared=True, required=False):
            return descriptor
        os.close(descriptor)  # pruned meanwhile


def _append(file: Path, line: Mapping[str, object], before: bytes = b"") -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.write(descriptor, before + json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def _is_live(file: Path) -> bool:
    if file.is_symlink() or not file.is_file():  # damaged; pipes would be waited for
        return False
    try:
        descriptor = try_open_locked(file, os.O_RDONLY, required=False)
    except FileNotFoundError:
        return False
    except OSError:  # nobody can say
        return True
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def _forget(runs: Path, which: set[str]) -> int:
    gone = 0
    for run in sorted(which):
        file = runs / f"{run}{_SUFFIX}"
        with suppress(FileNotFoundError):
            descriptor = try_open_locked(file, os.O_RDONLY, required=False)
            if descriptor is not None:  # else it goes on
                file.unlink()
                os.close(descriptor)
                gone += 1
    return gone
