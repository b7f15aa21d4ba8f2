"""A merge leaves only the input pages in the page cache that were there before, and drops no page too early."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from family import merge_text, recipe_of
from samples import sampled

from mergegate.merge_core import merge_methods
from mergegate.merge_core.engine import blocks, input_files, writer
from mergegate.merge_core.system import UNCACHED_ALIGN, cached_bytes, forget_cached

PART = 16384
STEPS = """name: first
merge_method: linear
models: [{model: a}, {model: b}]
parameters: {weight: 1}
---
merge_method: ties
base_model: base
models: [{model: first}, {model: a}]
parameters: {weight: 1, density: 0.4}
"""
TWICE = """merge_method: passthrough
slices:
- sources: [{model: a, layer_range: [0, 3]}]
- sources: [{model: a, layer_range: [1, 3]}]
"""


@dataclass
class Watched:
    """A log of reads and evictions of input pages, in order. A part is (file name, number)."""

    root: Path
    found: set[tuple[str, int]] = field(default_factory=set)
    reads: list[tuple[str, int, int]] = field(default_factory=list)  # (file, part, number of parts evicted before)
    gone: list[tuple[str, int]] = field(default_factory=list)
    uncached: set[tuple[str, int]] = field(default_factory=set)  # Parts read without the cache, or next to such parts.

    def name(self, fd: int) -> str:
        return os.path.relpath(Path(f"/proc/self/fd/{fd}").readlink(), self.root)

    def read(self, fd: int, start: int, count: int) -> None:
        for part in range(start // PART, -(-(start + count) // PART)):
            self.reads.append((self.name(fd), part, len(self.gone)))

    def forget(self, fd: int, start: int = 0, count: int = 0) -> None:
        if count:  # A call without a count concerns an output.
            assert (start % PART, count) == (0, PART), "whole parts: pages at their edges would stay"
            self.gone.append((self.name(fd), start // PART))

    def cached(self, fd: int, start: int, count: int) -> int:
        part = self.name(fd), start // PART
        assert part not in [(name, number) for name, number, _ in self.reads], "asked too late"
        return count if part in self.found else 0


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A log of every read and every evicted part, with small parts and with eviction active for merges of any size."""
    seen = Watched(tmp_path)
    real_into, real_at, real_uncached = blocks.read_into, blocks.read_at, blocks.read_uncached

    def into(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
        seen.read(fd, offset, len(buffer))
        real_into(fd, buffer, offset, path)

    def at(fd: int, buffer: memoryview, offset: int) -> int:
        seen.read(fd, offset, len(buffer))
        return real_at(fd, buffer, offset)

    def uncached(fd: int, buffer: memoryview, offset: int) -> int:
        count = real_uncached(fd, buffer, offset)
        assert (offset % UNCACHED_ALIGN, len(buffer) % UNCACHED_ALIGN) == (0, 0)
        seen.uncached.update((seen.name(fd), part) for part in range(offset // PART, -(-(offset + count) // PART)))
        return count

    for name, function in {"read_uncached": uncached, "read_into": into, "read_at": at}.items():
        monkeypatch.setattr(blocks, name, function)
    changes = {"forget_cached": seen.forget, "cached_bytes": seen.cached, "PART_BYTES": PART}
    for name, value in {**changes, "_MIN_INPUT_BYTES": 0, "_FAST_DISK": 0.0}.items():
        monkeypatch.setattr(input_files, name, value)
    return seen


def each_went_once_after_its_last_read(seen: Watched) -> None:
    read = {(name, part) for name, part, _ in seen.reads}
    assert read - seen.found <= set(seen.gone) <= (read | seen.uncached) - seen.found
    assert max(Counter(seen.gone).values(), default=1) == 1
    for name, part, before in seen.reads:
        assert (name, part) not in seen.gone[:before], "read again after it had gone"


@pytest.mark.parametrize("method", sampled(sorted(merge_methods()), ("linear", "ties", "wudi")))
def test_every_method_releases_all_pages_and_reads_no_released_page(wide: Path, watched: Watched, method: str) -> None:
    merge_text(recipe_of(method), wide, block_elements=16384, threads=3)
    assert len(watched.gone) > 8, "the case under test needs several parts a file"
    each_went_once_after_its_last_read(watched)


@pytest.mark.parametrize("offset", sampled((0, 8, 1), (0, 1)))
def test_only_a_single_pass_reads_past_the_cache_and_writes_the_same_bytes(
    wide: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    for name in "base", "a", "b", "c":  # A longer header shifts the numbers in the file.
        path = wide / name / "model.safetensors"
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        path.write_bytes((size + offset).to_bytes(8, "little") + data[8 : 8 + size] + b" " * offset + data[8 + size :])
    expected = merge_text(recipe_of("linear"), wide, "cached", block_elements=16384)
    assert not watched.uncached, "the disk works ahead until the first tensor is finished"
    monkeypatch.setattr(blocks, "_READ_AHEAD_BYTES", 0)
    watched.reads.clear()
    merge_text(recipe_of("ties"), wide, "ties", block_elements=16384)
    assert not watched.uncached, "later passes read from the cache"
    for kernels in ("fused", "torch"):
        watched.reads.clear()
        record = merge_text(recipe_of("linear"), wide, kernels, block_elements=16384, kernels=kernels)
        assert record.files == expected.files
    if offset == 1:
        assert not watched.uncached, "kernels need aligned numbers"
    elif hasattr(os, "O_DIRECT"):
        assert watched.uncached


@pytest.mark.parametrize("text", [STEPS, TWICE])
def test_shared_pages_are_released_after_their_last_use(
    family: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(f"{__name__}.PART", 512)
    monkeypatch.setattr(input_files, "PART_BYTES", 512)
    merge_text(text, family, threads=2)
    each_went_once_after_its_last_read(watched)


def test_pages_that_were_cached_before_stay_cached(wide: Path, watched: Watched) -> None:
    watched.found = {("a/model.safetensors", part) for part in range(3)}
    merge_text(recipe_of("ties"), wide, block_elements=16384)
    each_went_once_after_its_last_read(watched)
    assert not watched.found & set(watched.gone)
    assert ("a/model.safetensors", 3) in watched.gone


def test_large_tensors_are_released_between_passes_and_read_again(
    wide: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_NEXT_PASS_SHARE", 0)
    monkeypatch.setattr(input_files, "forget_cached", lambda fd, *_: watched.gone.append((watched.name(fd), 0)))
    whole = merge_text(recipe_of("linear"), wide, "whole", block_elements=16384)
    once = len(watched.gone)
    watched.reads.clear()
    again = merge_text(recipe_of("ties"), wide, block_elements=16384)
    assert len(watched.gone) - once > 2 * once
    assert whole.bytes_written == again.bytes_written


def test_a_small_merge_or_a_slow_disk_keeps_all_pages_cached(
    wide: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_FAST_DISK", math.inf)
    merge_text(recipe_of("ties"), wide, "slow")
    monkeypatch.setattr(input_files, "_FAST_DISK", 0.0)
    monkeypatch.setattr(input_files, "_MIN_INPUT_BYTES", 1 << 30)
    merge_text(recipe_of("ties"), wide, "small")
    assert watched.gone == []


def test_the_system_releases_the_pages(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This uses the real page cache, if the file system evicts pages at all."""
    monkeypatch.setattr(input_files, "_MIN_INPUT_BYTES", 0)
    monkeypatch.setattr(input_files, "_FAST_DISK", 0)
    files = {name: wide / name / "model.safetensors" for name in ("base", "a", "b", "c")}

    def cached(path: Path, *, evict: bool = False) -> int:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if evict:
                forget_cached(file.fileno())
            return cached_bytes(file.fileno(), 0, path.stat().st_size) or 0

    left = sum(cached(path, evict=True) for path in files.values())
    files["a"].read_bytes()
    if left or not (before := cached(files["a"])):
        pytest.skip("files lie in memory here, or the system does not tell what does")
    merge_text(recipe_of("ties"), wide, "kept")
    assert {name: cached(path) for name, path in files.items()} == {"base": 0, "a": before, "b": 0, "c": 0}
    assert cached(wide / "kept" / "model.safetensors") > 0
    merge_text(recipe_of("ties"), wide, "left", keep_output=False)
    assert cached(wide / "left" / "model.safetensors") == 0
    assert writer.forget_cached is forget_cached
