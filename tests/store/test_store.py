"""The store: an artifact is complete or absent, is trusted only if its manifest matches, and is built once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    found, made = Store(tmp_path).build("merge", KEY, Value, writes("abc"))
    assert made
    assert Store(tmp_path).build("merge", KEY, Value, never) == (found, False)
    assert (found.directory / "sub" / "weights").read_text() == "abc"


def test_the_digest_depends_on_content_and_not_on_the_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, _ = store.build("merge", KEY, Value, writes("abc"))
    same, _ = store.build("merge", KEY[::-1], Value, writes("abc"))
    other, _ = store.build("merge", "f" * 64, Value, writes("abd"))
    assert first.digest == same.digest != other.digest


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("sub/weights", None, "is missing"),
        ("sub/weights", "ab", "2 bytes instead of 3"),
        ("sub/weights", "abx", "was altered"),
        ("stray", "", "not part of this artifact"),
        (MANIFEST, "{", "cannot be read"),
        ("value.json", '{"words": 3}', "instead of|was altered"),
    ],
)
def test_a_damaged_artifact_is_a_miss_with_a_reason_and_is_rebuilt(
    tmp_path: Path, name: str, content: str | None, why: str
) -> None:
    store = Store(tmp_path)
    artifact, _ = store.build("merge", KEY, Value, writes("abc"))
    if content is None:
        (artifact.directory / name).unlink()
    else:
        (artifact.directory / name).write_text(content)
    with pytest.raises(StoreMiss, match=why):
        store.open("merge", KEY, Value)
    assert store.build("merge", KEY, Value, writes("abc")) == (artifact, True)


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


def fails(out: Path) -> Value:
    (out / "half").write_text("half")
    raise OSError("disk full")


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        Store(tmp_path).build("merge", KEY, Value, fails)
    assert list((tmp_path / "merge").iterdir()) == []
    assert list((tmp_path / "locks").iterdir()) == []


def test_a_resumable_build_finds_what_the_last_one_left(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(OSError, match="disk full"):
        store.build("merge", KEY, Value, fails, resumable=True)
    artifact, _ = store.build("merge", KEY, Value, lambda out: Value(words=(out / "half").read_text()), resumable=True)
    assert artifact.value.words == "half"


def test_two_processes_build_the_same_key_once(tmp_path: Path) -> None:
    inside, go_on, waits = threading.Event(), threading.Event(), threading.Event()

    def slow(out: Path) -> Value:
        inside.set()
        assert go_on.wait(HANG_S)
        return Value(words="once")

    def build(make: Callable[[Path], Value], callbacks: BuildCallbacks) -> bool:
        return Store(tmp_path).build("merge", KEY, Value, make, callbacks=callbacks)[1]

    with ThreadPoolExecutor() as threads:
        first = threads.submit(build, slow, BuildCallbacks())
        assert inside.wait(HANG_S)
        second = threads.submit(build, never, BuildCallbacks(on_wait=waits.set))
        assert waits.wait(HANG_S)
        go_on.set()
        results = [first.result(HANG_S), second.result(HANG_S)]
    assert results == [True, False]


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
