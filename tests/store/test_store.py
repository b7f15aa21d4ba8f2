"""An artifact is complete or absent, matches its manifest, is built once, and has a key of its inputs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_S
from pydantic import BaseModel

from mergegate.tasks.base.store.manifest import NotInKey, canonical, digest, family_prefix, merkle, stage_key
from mergegate.tasks.base.store.store import MANIFEST, BuildCallbacks, Store, StoreMiss

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


def test_a_built_artifact_is_found_and_its_digest_depends_on_the_content_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, made = store.build("merge", KEY, Value, writes("abc"))
    assert made
    assert Store(tmp_path).build("merge", KEY, Value, never) == (first, False)
    assert (first.directory / "sub" / "weights").read_text() == "abc"
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
    file = artifact.directory / name
    before = file.stat() if file.exists() else None
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
        if before:  # The damage is found although the time does not change.
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for deep in (False, True):
        with pytest.raises(StoreMiss, match=why):
            store.open("merge", KEY, Value, deep=deep)
    assert store.build("merge", KEY, Value, writes("abc")) == (artifact, True)


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
        from mergegate.tasks.base.store import Store
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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


class PlacedModel(BaseModel):
    digest: str
    place: Annotated[Path, NotInKey]


@pytest.mark.story
@given(st.dictionaries(st.text(), json_values))
def test_the_order_of_a_mapping_does_not_matter(value: dict[str, object]) -> None:
    assert digest(value) == digest(dict(reversed(value.items())))


@settings(max_examples=25)
@given(json_values)
def test_a_digest_is_the_sha256_of_plain_json(value: object) -> None:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert digest(value) == hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def test_the_key_covers_stage_version_and_inputs_except_fields_marked_not_in_key() -> None:
    assert len({stage_key("merge", 1, {"a": 1}), stage_key("merge", 2, {"a": 1}), stage_key("gate", 1, {"a": 1})}) == 3
    assert digest(PlacedModel(digest="d", place=Path("/a"))) == digest(PlacedModel(digest="d", place=Path("/b")))
    assert digest(PlacedModel(digest="d", place=Path("/a"))) != digest(PlacedModel(digest="e", place=Path("/a")))


def test_only_keys_of_one_family_share_a_prefix() -> None:
    def key(**inputs: object) -> str:
        return stage_key("evaluate", 1, inputs, "part")

    first, second = key(model="m", part=[0, 10]), key(model="m", part=[10, 20])
    prefix = family_prefix("evaluate", 1, {"model": "m", "part": "any"}, "part")
    assert first != second
    assert len(first) == len(second) == 64
    assert first.startswith(prefix)
    assert second.startswith(prefix)
    assert first[:32] != second[:32]  # Each has a separate directory.
    assert not key(model="other", part=[0, 10]).startswith(prefix)
    assert not stage_key("evaluate", 2, {"model": "m", "part": [0, 10]}, "part").startswith(prefix)
    assert first[16:] == stage_key("evaluate", 1, {"model": "m", "part": [0, 10]})[16:]


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", {1: 2}, float("nan")])
def test_a_value_without_a_canonical_form_is_an_error(value: object) -> None:
    error = ValueError if isinstance(value, float) else TypeError
    with pytest.raises(error, match=r"only string keys" if value == {1: 2} else "no canonical JSON form"):
        canonical(value)


def test_a_merkle_digest_covers_name_size_and_hash() -> None:
    trees = ({"a": (1, "x")}, {"b": (1, "x")}, {"a": (2, "x")}, {"a": (1, "y")})
    assert len(set(map(merkle, trees))) == 4
