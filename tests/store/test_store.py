"""The store: an artifact is complete or absent, is trusted only if its manifest matches, and is built once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import HANG_S
from pydantic import BaseModel

from mergegate.tasks.store.store import MANIFEST, BuildCallbacks, Store, StoreMiss

KEY = "0123456789abcdef" * 4


class Value(BaseModel):
    words: str


def writes(text: str) -> Callable[[Path], Value]:
    def make(out: Path) -> Value:
        (out / "sub").mkdir()
        (out / "sub" / "weights").write_text(text)
        return Value(words=text)

    return make


def never(out: Path) -> Value:
    raise AssertionError("it was built a second time")


def test_a_built_artifact_is_found_and_not_rebuilt(tmp_path: Path) -> None:
    built, made = Store(tmp_path).build("merge", KEY, Value, writes("abc"))
    found, made_again = Store(tmp_path).build("merge", KEY, Value, never)
    assert (made, made_again) == (True, False)
    assert found == built
    assert (found.directory / "sub" / "weights").read_text() == "abc"


def test_the_digest_depends_on_content_and_not_on_the_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, _ = store.build("merge", KEY, Value, writes("abc"))
    same, _ = store.build("merge", KEY[::-1], Value, writes("abc"))
    other, _ = store.build("merge", "f" * 64, Value, writes("abd"))
    assert first.digest == same.digest != other.digest


def damage_by_deleting(directory: Path) -> None:
    (directory / "sub" / "weights").unlink()


def damage_by_truncating(directory: Path) -> None:
    (directory / "sub" / "weights").write_text("ab")


def damage_by_altering(directory: Path) -> None:
    (directory / "sub" / "weights").write_text("abx")


def damage_by_adding(directory: Path) -> None:
    (directory / "stray").write_text("")


def damage_the_manifest(directory: Path) -> None:
    (directory / MANIFEST).write_text("{")


def damage_the_value(directory: Path) -> None:
    (directory / "value.json").write_text('{"words": 3}')


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damage_by_deleting, "is missing"),
        (damage_by_truncating, "2 bytes instead of 3"),
        (damage_by_altering, "was altered"),
        (damage_by_adding, "not part of this artifact"),
        (damage_the_manifest, "cannot be read"),
        (damage_the_value, "instead of|was altered"),
    ],
)
def test_a_damaged_artifact_is_a_miss_with_a_reason_and_is_rebuilt(
    tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    store = Store(tmp_path)
    artifact, _ = store.build("merge", KEY, Value, writes("abc"))
    damage(artifact.directory)
    with pytest.raises(StoreMiss, match=why):
        store.open("merge", KEY, Value)
    again, made = store.build("merge", KEY, Value, writes("abc"))
    assert made
    assert again == artifact


def test_an_alteration_that_keeps_size_and_time_is_detected(tmp_path: Path) -> None:
    store = Store(tmp_path)
    artifact, _ = store.build("merge", KEY, Value, writes("abc"))
    weights = artifact.directory / "sub" / "weights"
    before = weights.stat()
    weights.write_text("abx")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    for deep in (False, True):
        with pytest.raises(StoreMiss, match="was altered"):
            store.open("merge", KEY, Value, deep=deep)


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails(out: Path) -> Value:
        (out / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Store(tmp_path).build("merge", KEY, Value, fails)
    assert list((tmp_path / "merge").iterdir()) == []
    assert list((tmp_path / "locks").iterdir()) == []


def test_a_resumable_build_finds_what_the_last_one_left(tmp_path: Path) -> None:
    def fails(out: Path) -> Value:
        (out / "half").write_text("half")
        raise OSError("killed")

    def goes_on(out: Path) -> Value:
        return Value(words=(out / "half").read_text())

    store = Store(tmp_path)
    with pytest.raises(OSError, match="killed"):
        store.build("merge", KEY, Value, fails, resumable=True)
    artifact, _ = store.build("merge", KEY, Value, goes_on, resumable=True)
    assert artifact.value.words == "half"


def test_two_processes_build_the_same_key_once(tmp_path: Path) -> None:
    inside, go_on, waits = threading.Event(), threading.Event(), threading.Event()

    def slow(out: Path) -> Value:
        inside.set()
        assert go_on.wait(HANG_S)
        return Value(words="once")

    results: list[bool] = []

    def first() -> None:
        results.append(Store(tmp_path).build("merge", KEY, Value, slow)[1])

    def second() -> None:
        results.append(
            Store(tmp_path).build("merge", KEY, Value, never, callbacks=BuildCallbacks(on_wait=waits.set))[1]
        )

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(HANG_S)
    threads[1].start()
    assert waits.wait(HANG_S)
    go_on.set()
    for thread in threads:
        thread.join(HANG_S)
    assert sorted(results) == [False, True]


def test_a_killed_builder_leaves_no_lock_and_no_artifact(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from pydantic import BaseModel
        from mergegate.tasks.store import Store
        class Value(BaseModel):
            words: str
        def hangs(out):
            (out / "half").write_text("half")
            print("inside", flush=True)
            time.sleep(600)
        Store(Path({str(tmp_path)!r})).build("merge", {KEY!r}, Value, hangs)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "inside\n"
        builder.send_signal(signal.SIGKILL)
    store = Store(tmp_path)
    with pytest.raises(StoreMiss, match="not in the store"):
        store.open("merge", KEY, Value)
    artifact, made = store.build("merge", KEY, Value, writes("abc"))
    assert made
    assert not (artifact.directory / "half").exists()


def test_a_family_is_found_by_prefix_without_damaged_members(tmp_path: Path) -> None:
    store, damage = Store(tmp_path), list[str]()
    keys = [f"{'a' * 16}{digit * 48}" for digit in "123"]
    for key in (*keys, "b" * 64):
        store.build("evaluate", key, Value, writes(key))
    (store.directory("evaluate", keys[1]) / "sub" / "weights").write_text("torn")
    store.directory("evaluate", keys[0]).with_name(f"{'a' * 16}4.partial").mkdir()
    found = store.family("evaluate", "a" * 16, Value, on_damage=damage.append)
    assert [one.key for one in found] == [keys[0], keys[2]]
    assert len(damage) == 1
    assert store.family("merge", "a" * 16, Value) == ()


def test_a_locked_family_is_awaited(tmp_path: Path) -> None:
    store, order = Store(tmp_path), list[str]()
    waits = threading.Event()

    def second() -> None:
        with store.hold_family("evaluate", "a" * 16, waits.set):
            order.append("second")

    with store.hold_family("evaluate", "a" * 16), store.hold_family("evaluate", "b" * 16):
        other = threading.Thread(target=second)
        other.start()
        assert waits.wait(HANG_S)
        order.append("first")
    other.join(HANG_S)
    assert order == ["first", "second"]
