"""Garbage collection with real files, next to builds and runs, killed at any call, and through a hundred runs."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faults import disk_calls
from pydantic import BaseModel

from mergegate.tasks.base import store
from mergegate.tasks.base.store.store import TRASH

EVERYTHING = store.RetentionRule(grace_s=0.0)
DAY = 86_400.0


class Value(BaseModel):
    words: str


def key_of(stage: str, *inputs: object) -> str:
    return store.stage_key(stage, 1, {"inputs": list(inputs)})


@dataclass
class Home:
    """A store, the records of its runs, and the artifacts that were built."""

    place: Path
    made: list[store.EntryName] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root, self.runs = self.place / "store", self.place / "runs"
        self.store = store.Store(self.root)

    def build(self, stage: str, key: str, run: str = "", size: int = 1000) -> None:
        """Build an artifact as a stage does: record the use, build, mark as used."""
        if run:
            assert store.record_use(self.runs, run, stage, key, "")

        def make(out: Path) -> Value:
            (out / "sub").mkdir()
            (out / "sub" / "weights").write_bytes(bytes(size))
            self.made.append(store.EntryName(stage, key[:32]))
            return Value(words=key)

        if stage == "gate":
            made = lambda: self.made.append(store.EntryName(stage, key[:32])) or Value(words=key)  # noqa: E731
            self.store.build_value(stage, key, Value, made)
        else:
            self.store.build(stage, key, Value, make)
        self.store.mark_used(stage, key)

    def has(self, stage: str, key: str) -> bool:
        with suppress(store.StoreMiss):
            if stage == "gate":
                self.store.open_value(stage, key, Value)
            else:
                self.store.open(stage, key, Value, deep=True)
            return True
        return False

    def names(self) -> set[store.EntryName]:
        return {one.entry_name for one in store.list_store(self.root)}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def age(home: Home, days: float) -> None:
    for one in store.list_store(home.root):
        place = home.root / one.stage / one.name
        os.utime(place, (place.stat().st_mtime - days * DAY,) * 2)


def test_unneeded_entries_are_removed_only_after_their_grace_period_since_the_last_use(home: Home) -> None:
    old, used, young = key_of("merge", "old"), key_of("gate", 1), key_of("merge", "young")
    home.build("merge", old)
    home.build("gate", used)
    age(home, 1.5)
    home.build("merge", young)
    home.store.mark_used("gate", used)
    rule, before = store.RetentionRule(grace_s=DAY), sorted(home.place.rglob("*"))
    assert len(store.collect_garbage(home.root, home.runs, rule, dry_run=True).plan.removals) == 1
    assert sorted(home.place.rglob("*")) == before
    done = store.collect_garbage(home.root, home.runs, rule)
    assert [one.key for one, _ in done.plan.removals] == [old[:32]]
    assert done.bytes_freed > 1000
    assert (home.has("merge", old), home.has("merge", young), home.has("gate", used)) == (False, True, True)
    assert not (home.root / TRASH).exists()
    assert list((home.root / "locks").iterdir()) == []
    assert store.list_store(home.place / "nowhere") == ()
    assert store.collect_garbage(home.place / "nowhere", home.runs, rule).plan.removals == ()


def test_leftovers_are_removed_and_foreign_files_are_kept(home: Home) -> None:
    key = key_of("merge", 1)
    home.build("merge", key)
    place = home.store.directory("merge", key)
    shutil.copytree(place, place.with_name("f" * 32 + ".partial"))
    (place.parent / ("e" * 32 + ".json.1-2.partial")).write_text("half")
    (place.parent / f"{place.name}.json.1-2.partial").write_text("half, next to an artifact that a run needs")
    (place.parent / "notes.txt").write_text("a person's")
    (place.parent / ("d" * 32)).symlink_to(home.place)
    with store.open_run(home.runs, "one", "release", "demo"):
        store.record_use(home.runs, "one", "merge", key, "")
        store.collect_garbage(home.root, home.runs, EVERYTHING)
    assert sorted(path.name for path in place.parent.iterdir()) == sorted([place.name, "notes.txt", "d" * 32])
    assert home.has("merge", key)


def test_an_artifact_that_is_being_built_is_kept(home: Home) -> None:
    key, begun, go_on = key_of("merge", 1), threading.Event(), threading.Event()

    def make(out: Path) -> Value:
        (out / "half").write_text("half")
        begun.set()
        assert go_on.wait(60)
        return Value(words="whole")

    builder = threading.Thread(target=lambda: home.store.build("merge", key, Value, make))
    builder.start()
    assert begun.wait(60)
    done = store.collect_garbage(home.root, home.runs, store.RetentionRule(grace_s=0.0, quota=0))
    assert done.plan.removals == ()
    assert [why for _, why in done.plan.retained] == ["in use"]
    go_on.set()
    builder.join(60)
    assert home.has("merge", key)


def test_an_entry_recorded_during_its_removal_is_restored(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run records its use after the collector's first check and before its second."""
    key = key_of("merge", 1)
    home.build("merge", key)
    rename = Path.rename
    with store.open_run(home.runs, "one", "release", "demo"):

        def noted_meanwhile(path: Path, to: Path) -> Path:
            moved = rename(path, to)
            store.record_use(home.runs, "one", "merge", key, "")
            return moved

        monkeypatch.setattr(Path, "rename", noted_meanwhile)
        assert store.collect_garbage(home.root, home.runs, EVERYTHING).plan.removals == ()
        assert home.has("merge", key)


@pytest.mark.story
def test_an_artifact_removed_at_any_point_of_the_check_is_a_miss_and_rebuilt(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact is removed before each of the calls with which a build examines it."""
    key = key_of("merge", 1)
    home.build("merge", key)
    directory = home.store.directory("merge", key)
    calls = 0

    def counted(name: str, gone_at: int | None) -> Callable[..., Any]:
        real = getattr(os, name)

        def calling(path: Any, *rest: Any, **more: Any) -> Any:
            nonlocal calls
            if isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(directory):
                calls += 1
                if calls == gone_at:
                    shutil.rmtree(directory)
            return real(path, *rest, **more)

        return calling

    def look(gone_at: int | None) -> None:
        nonlocal calls
        calls = 0
        with monkeypatch.context() as patch:
            for name in ("open", "stat", "lstat", "scandir"):
                patch.setattr(os, name, counted(name, gone_at))
            home.build("merge", key)

    look(None)
    total = calls
    assert total > 5
    for at in range(1, total + 1):
        before = len(home.made)
        look(at)
        assert len(home.made) >= before
        home.build("merge", key)
        assert home.has("merge", key), f"gone before call {at}"


@pytest.mark.story
def test_two_concurrent_collectors_remove_each_entry_once(home: Home) -> None:
    keys = [key_of("merge", number) for number in range(20)]
    for key in keys:
        home.build("merge", key)
    kept = keys[:5]
    with store.open_run(home.runs, "one", "release", "demo"):
        for key in kept:
            store.record_use(home.runs, "one", "merge", key, "")
        start = threading.Barrier(2)

        def collect() -> list[str]:
            start.wait(60)
            return [one.key for one, _ in store.collect_garbage(home.root, home.runs, EVERYTHING).plan.removals]

        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(collect) for _ in range(2)]
    gone = [key for each in both for key in each.result()]
    assert sorted(gone) == sorted(key[:32] for key in keys[5:])
    assert all(home.has("merge", key) for key in kept)


class Killed(BaseException):
    """The end of the collector's process."""


@contextmanager
def killed_at(at: int | None) -> Iterator[list[int]]:
    """Prevent the `at`-th call that changes the disk and all later ones."""
    count = [0]

    def step(name: str, path: object) -> None:
        count[0] += 1
        if at is not None and count[0] >= at:
            raise Killed

    with disk_calls(step, names=("rename", "unlink", "rmdir", "mkdir", "fsync")):
        yield count


def filled(home: Home) -> tuple[list[store.EntryName], list[store.EntryName]]:
    """Build some artifacts that a run needs and some that no run needs."""
    needed, loose = (
        [store.EntryName(stage, key_of(stage, n)) for stage in ("merge", "gate", "evaluate")] for n in (1, 2)
    )
    with store.open_run(home.runs, "one", "release", "demo") as run:
        for name in needed:
            home.build(*name, "one", size=10)
        run.end("released", judged=True)
    for name in loose:
        home.build(*name, size=10)
    return needed, loose


@pytest.mark.story
def test_a_collector_killed_at_any_call_leaves_no_partial_artifact(tmp_path: Path) -> None:
    original = Home(tmp_path / "original")
    needed, loose = filled(original)
    shutil.copytree(original.place, tmp_path / "counted", symlinks=True)
    counted = Home(tmp_path / "counted")
    with killed_at(None) as count:
        store.collect_garbage(counted.root, counted.runs, EVERYTHING)
    assert count[0] > 20
    for at in range(1, count[0] + 1):
        home = Home(tmp_path / f"at-{at}")
        shutil.copytree(original.place, home.place, symlinks=True)
        with killed_at(at), suppress(Killed):
            store.collect_garbage(home.root, home.runs, EVERYTHING)
        damaged = [one for one in store.examine_store(home.root, deep=True) if one.kind == "damaged"]
        assert damaged == [], f"killed at {at}"
        assert all(home.has(*name) for name in needed)
        store.collect_garbage(home.root, home.runs, EVERYTHING)
        assert home.names() == {store.EntryName(stage, key[:32]) for stage, key in needed}
        assert not (home.root / TRASH).exists()
        assert not any(home.has(*name) for name in loose)
        shutil.rmtree(home.place)


def test_a_quota_that_is_too_small_removes_all_else_and_says_by_how_much(home: Home) -> None:
    with store.open_run(home.runs, "one", "release", "demo") as run:
        home.build("merge", key_of("merge", 1), "one")
        run.end("released", judged=True)
    home.build("merge", key_of("merge", 2))
    done = store.collect_garbage(home.root, home.runs, store.RetentionRule(None, 500))
    assert [one.key for one, _ in done.plan.removals] == [key_of("merge", 2)[:32]]
    assert done.plan.over_quota == store.store_bytes(home.root) - 500 > 0
    assert store.explain_retention(home.runs) == {store.EntryName("merge", key_of("merge", 1)[:32]): "release of demo"}
