"""The engine reads each input from one open file, which must stay unchanged until the result is sealed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from family import merge_text, random_tensors, save_checkpoint

from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.engine import blocks
from mergegate.merge_core.errors import ChangedInput

TEXT = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"
WEIGHTS = "model.safetensors"


@pytest.fixture
def parents(tmp_path: Path) -> Path:
    for seed, name in enumerate("ab"):
        save_checkpoint(tmp_path / name, random_tensors(seed))
    return tmp_path


def overwrite(file: Path) -> None:
    """Change bytes of a file in place and restore its modification time."""
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"\x01\x02")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.rename(file)


def exchange(file: Path) -> None:
    file.rename(file.with_name("real"))
    file.symlink_to("real")


CHANGES: dict[str, Callable[[Path], None]] = {
    "overwritten": overwrite,
    "replaced": replace,
    "linked": exchange,
    "truncated": lambda file: os.truncate(file, 100),
    "appended": lambda file: file.open("ab").write(b"x") and None,
    "removed": Path.unlink,
    "touched": Path.touch,  # Without a hash, the engine cannot tell a touched file from a changed one.
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("nth", [1, 9])
def test_an_input_that_changes_while_it_is_read_ends_the_merge(
    parents: Path, change: Callable[[Path], None], nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, original = [0], blocks.read_into

    def reading(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
        reads[0] += 1
        if reads[0] == nth:
            change(parents / "b" / WEIGHTS)
        original(fd, buffer, offset, path)

    monkeypatch.setattr(blocks, "read_into", reading)
    with pytest.raises(ChangedInput) as caught:
        merge_text(TEXT, parents, threads=1)
    assert str(parents / "b" / WEIGHTS) in caught.value.where
    assert not (parents / "out" / "config.json").exists()
    assert not list((parents / "out").glob("*.safetensors"))
    assert reads[0] >= nth


def test_nothing_is_sealed_if_the_last_check_fails(parents: Path) -> None:
    recipe = load_recipe(TEXT)
    plan = plan_merge(recipe, {str(ref): open_checkpoint(parents / ref.path) for ref in recipe.references()})

    def say_no() -> None:
        assert not (parents / "out" / "config.json").exists()
        raise ChangedInput("a tokenizer", found="is another")

    with pytest.raises(ChangedInput, match="a tokenizer"):
        merge_weights(plan, parents / "out", before_sealing=say_no)
    assert not (parents / "out" / "config.json").exists()
    assert merge_weights(plan, parents / "out").files == merge_weights(plan, parents / "undisturbed").files


def test_a_merge_of_changed_inputs_is_not_resumed(parents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge starts over even if size and modification time are unchanged."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(Exception, match="Input/output error"):
            merge_text(TEXT, parents)
    overwrite(parents / "b" / WEIGHTS)
    record = merge_text(TEXT, parents)
    assert record.bytes_resumed == 0
    assert record.files == merge_text(TEXT, parents, "anew").files
