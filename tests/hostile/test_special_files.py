"""Special files in place of user-specified files: every reader reports them immediately, without waiting."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mergegate.flows.prefect_api.schedules import load_schedules
from mergegate.flows.profile import load_profile
from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.files.hashing import sha256_file
from mergegate.merge_core.parsing import MAX_DATA_BYTES
from mergegate.tasks.judge.prompts import pin_prompts
from mergegate.tasks.judge.settings import JudgeSettings
from mergegate.tasks.perplexity.text import TextSetting, pin_text
from mergegate.tasks.preflight.licenses.table import load_table
from mergegate.tasks.publish.signature import private_key, public_key
from mergegate.tasks.shadow.traffic.replay import read_traffic

KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "no file": lambda path: None,
    "a huge file": lambda path: path.touch() or os.truncate(path, MAX_DATA_BYTES + 1),  # type: ignore[func-returns-value]
}
READERS: dict[str, Callable[[Path], object]] = {
    "profile": load_profile,
    "recipe": load_recipe,
    "schedules": load_schedules,
    "license table": load_table,
    "public key": public_key,
    "private key": private_key,
    "held-out text": lambda path: pin_text(path, "text", HashMemo(path.parent / "hashes"), TextSetting("documents")),
    "prompts": lambda path: pin_prompts(
        JudgeSettings(url="http://localhost:1", model="judge", guarded_by="base", prompts=path),
        path.parent,
        HashMemo(path.parent / "hashes"),
    ),
    "traffic": lambda path: read_traffic(path, "model"),
}


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fail a test that waits for a pipe."""

    def fail(signal_number: int, frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_refuses_what_is_not_a_plain_file(tmp_path: Path, reader: str, kind: str) -> None:
    path = tmp_path / "named.jsonl"
    KINDS[kind](path)
    with pytest.raises(InvalidInput) as refusal:
        READERS[reader](path)
    if kind not in ("no file", "a huge file"):
        assert refusal.value.found == kind
        assert path.name in refusal.value.where


@pytest.mark.parametrize("kind", ["a named pipe", "a directory", "a device"])
def test_only_plain_files_are_hashed(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "named")
    with pytest.raises(InvalidInput) as refusal:
        sha256_file(tmp_path / "named")
    assert refusal.value.found == kind
