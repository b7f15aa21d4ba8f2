"""A shared store: other machines find an artifact whole or not at all, and its failures never stop a run."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from patience import HANG_S
from pydantic import BaseModel

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage.project import shared_store
from mergegate.tasks.base.store import SharedStore, Store, StoredValue, StoreMiss, stage_key
from mergegate.tasks.base.store.shared import _Lease

KEY = stage_key("merge", 1, {"x": 1})
PROJECT = Path(__file__).resolve().parents[2]


class Said(BaseModel):
    answer: int


class Machine:
    """A machine with a store of its own."""

    def __init__(self, root: Path, address: str, **options: Any) -> None:
        self.shared = SharedStore(address, root, **{"max_bytes": 1 << 30, "lease_s": 0.1, **options})
        self.store = Store(root, self.shared)
        self.made = 0

    def build(self, key: str = KEY, answer: int = 42, data: bytes = b"weights") -> Any:
        def make(out: Path) -> Said:
            self.made += 1
            (out / "inner").mkdir(exist_ok=True)
            (out / "a").write_bytes(data)
            (out / "inner" / "b").write_bytes(data * 2)
            return Said(answer=answer)

        artifact, _ = self.store.build("evaluate", key, Said, make)
        self.shared.settle()
        return artifact

    def value(self, key: str = KEY) -> StoredValue[Said]:
        def make() -> Said:
            self.made += 1
            return Said(answer=7)

        found, _ = self.store.build_value("gate", key, Said, make)
        self.shared.settle()
        return found


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared"


def test_an_empty_machine_fetches_everything_once_and_rebuilds_nothing(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Machine(tmp_path / "1", address), Machine(tmp_path / "2", address)
    here, there = one.build(), two.build()
    assert (one.made, two.made) == (1, 0)
    assert (there.digest, there.value, there.files) == (here.digest, here.value, here.files)
    assert (there.directory / "inner" / "b").read_bytes() == b"weightsweights"
    assert one.value() == two.value()
    assert (one.made, two.made) == (2, 0)
    assert list((tmp_path / "shared").rglob("*.lease")) == []
    monkeypatch.setattr(SharedStore, "_connected", property(lambda self: pytest.fail("it is here")))
    two.build()


def test_family_members_are_fetched_from_the_shared_store(tmp_path: Path, address: str) -> None:
    one, two = Machine(tmp_path / "1", address), Machine(tmp_path / "2", address)
    for number, key in enumerate(("a" * 16 + "0" * 48, "a" * 16 + "1" * 48, "b" * 64)):
        one.build(key, answer=number)
    assert [found.value.answer for found in two.store.family("evaluate", "a" * 16, Said)] == [0, 1]


class Flaky:
    """A file system on which every request fails from the `at`-th on."""

    def __init__(self, fs: Any, at: int) -> None:
        self.fs, self.at, self.count = fs, at, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.fs, name)
        if name not in ("put_file", "pipe_file", "get_file", "cat_file", "makedirs", "exists", "size", "rm_file"):
            return call

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count >= self.at:
                raise PermissionError("the shared store says no")
            return call(*args, **kwargs)

        return counted


def flaky(machine: Machine, at: int) -> Flaky:
    fs, base = machine.shared._connected
    failing = Flaky(fs, at)
    machine.shared.__dict__["_connected"] = (failing, base)
    return failing


@pytest.mark.story
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.proof)])
def test_a_run_survives_any_failed_request_and_uses_no_incomplete_artifact(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    monkeypatch.setattr("mergegate.tasks.base.store.shared._POLL_S", (0.02, 0.1))
    at = 1
    while True:
        shared = f"{address}-{at}"
        one, two = Machine(tmp_path / f"{at}-1", shared), Machine(tmp_path / f"{at}-2", shared)
        failing = flaky(one, at)
        assert one.build().value.answer == 42
        if failing.count < at:
            break
        assert two.build().digest == one.store.open("evaluate", KEY, Said).digest
        # The next process on that machine sends the rest.
        again = Machine(tmp_path / f"{at}-1", shared)
        again.build("c" * 64)
        three = Machine(tmp_path / f"{at}-3", shared)
        three.build()
        assert (again.made, three.made) == (1, 0)
        at += stride
    assert at > 10
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_reader_builds_the_artifact_itself_after_any_failed_request(tmp_path: Path, address: str) -> None:
    Machine(tmp_path / "maker", address).build()
    at = 1
    while True:
        reader = Machine(tmp_path / str(at), address)
        failing = flaky(reader, at)
        assert reader.build().value.answer == 42
        if failing.count < at:
            break
        assert reader.made == 1
        at += 1
    assert reader.made == 0
    assert at > 4


@pytest.mark.parametrize("how", ["altered", "truncated", "missing", "manifest", "name"])
def test_a_damaged_shared_artifact_is_a_miss_and_is_replaced(tmp_path: Path, address: str, how: str) -> None:
    Machine(tmp_path / "1", address).build()
    stage = tmp_path / "shared" / "evaluate"
    (marker,) = stage.glob("*.manifest")
    manifest = json.loads(marker.read_text())
    victim = max((stage / KEY[:32]).iterdir(), key=lambda path: path.stat().st_size)
    if how == "altered":
        victim.write_bytes(b"W" * victim.stat().st_size)
    elif how == "truncated":
        victim.write_bytes(b"")
    elif how == "missing":
        victim.unlink()
    elif how == "manifest":  # A valid manifest that does not match the content.
        marker.write_text(json.dumps({**manifest, "digest": "0" * 64}))
    else:  # A name that leads out of the store.
        marker.write_text(json.dumps({**manifest, "files": {"../../../evil": manifest["files"]["a"]}}))
    two, three = Machine(tmp_path / "2", address), Machine(tmp_path / "3", address)
    assert two.build().value.answer == 42
    assert not list((tmp_path / "2").rglob("*.arriving*"))
    assert not list(tmp_path.rglob("evil"))
    three.build()
    assert (two.made, three.made) == (1, 0)


def test_a_too_large_artifact_is_not_shared(tmp_path: Path, address: str) -> None:
    one, two = Machine(tmp_path / "1", address, max_bytes=10), Machine(tmp_path / "2", address)
    one.build()
    two.build()
    assert (one.made, two.made) == (1, 1)


def test_an_unavailable_shared_store_is_not_used_for_a_minute(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path / "1", address)
    failing = flaky(machine, 1)
    machine.build()
    machine.value()
    assert failing.count == 1
    assert len(caplog.records) == 1
    assert "continuing without it" in caplog.text


def test_a_failed_stage_releases_its_lease(tmp_path: Path, address: str) -> None:
    one, two = Machine(tmp_path / "1", address), Machine(tmp_path / "2", address)

    def fails(out: Path) -> Said:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        one.store.build("evaluate", KEY, Said, fails)
    assert two.build().value.answer == 42


WORKER = """
import os, sys
from pathlib import Path
from pydantic import BaseModel
from mergegate.tasks.base.store import SharedStore, Store, stage_key
root, address, count, kill = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
class Said(BaseModel):
    answer: int
shared = SharedStore(address, root, 1 << 30, lease_s=float(sys.argv[5]))
store = Store(root, shared)
print("ready", flush=True)
sys.stdin.readline()
digests = []
for number in range(4):
    def make(out):
        with open(count, "a") as file:
            file.write(f"{number}\\n")
        if kill == "kill":
            os._exit(9)
        (out / "weights").write_bytes(bytes([number]) * 300_000)
        return Said(answer=number)
    digests.append(store.build("evaluate", stage_key("evaluate", 1, {"n": number}), Said, make)[0].digest)
print(digests)
"""


def worker(root: Path, address: str, count: Path, kill: str = "", lease_s: float = 60) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(root), address, str(count), kill, str(lease_s)],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.story
def test_one_of_many_concurrent_workers_acquires_the_lease(tmp_path: Path) -> None:
    """All workers share a file system; fsspec's own guard is not atomic, because it checks first and writes later."""
    shared = SharedStore(f"file://{tmp_path}/shared", tmp_path / "own", 1 << 20)
    for turn in range(40):
        leases = [_Lease(shared, f"{tmp_path}/shared/evaluate/{turn}.lease") for _ in range(8)]
        start = threading.Barrier(len(leases))

        def take(lease: _Lease, start: threading.Barrier = start) -> bool:
            start.wait()
            return lease.acquire()

        with ThreadPoolExecutor(len(leases)) as pool:
            assert sum(pool.map(take, leases)) == 1
        for lease in leases:
            lease.release()


@pytest.mark.story
def test_the_lease_of_a_killed_worker_passes_to_the_next(tmp_path: Path, address: str) -> None:
    count = tmp_path / "count"
    killed = worker(tmp_path / "1", address, count, "kill", lease_s=0.5)
    killed.communicate("\n", timeout=HANG_S)
    assert list((tmp_path / "shared").rglob("*.lease"))
    following = worker(tmp_path / "2", address, count, lease_s=0.5)
    following.communicate("\n", timeout=HANG_S)
    assert following.returncode == 0
    assert sorted(count.read_text().split()) == ["0", "0", "1", "2", "3"]


@pytest.mark.story
def test_a_bucket_can_be_the_shared_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROJECT / "tests" / "publish")
    from bucket import s3_on_loopback

    with s3_on_loopback() as bucket, bucket.found_by_clients(monkeypatch):
        one, two = (Machine(tmp_path / name, "s3://models/store", lease_s=60) for name in ("1", "2"))
        assert one.build().digest == two.build().digest
        assert one.value() == two.value()
        assert (one.made, two.made) == (2, 0)
        assert (one.shared.fetch_counts.total(), two.shared.fetch_counts.total()) == (0, 2)
        assert len(two.store.family("evaluate", KEY[:16], Said)) == 1
        assert [key for key in bucket.objects() if key.endswith(".lease")] == []
        taken, other = (_Lease(each.shared, each.shared._path("evaluate", "x.lease")) for each in (one, two))
        assert (taken.acquire(), other.acquire()) == (True, False)
        taken.release()
        assert other.acquire()
        other.release()


def test_the_environment_is_read_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MERGEGATE_SHARED_STORE", raising=False)
    assert shared_store(tmp_path) is None
    monkeypatch.setenv("MERGEGATE_SHARED_STORE", "memory://somewhere")
    found = shared_store(tmp_path)
    assert found is shared_store(tmp_path)
    assert (found.address, found.max_bytes) == ("memory://somewhere", 10**9)
    for name, value in (("", "somewhere"), ("", "s4://bucket"), ("", "memory://elsewhere"), ("_MAX_SIZE", "much")):
        monkeypatch.setenv(f"MERGEGATE_SHARED_STORE{name}", value)
        if value != "memory://elsewhere":
            with pytest.raises(InvalidInput, match=f"MERGEGATE_SHARED_STORE{name}"):
                shared_store(tmp_path)


def test_without_a_shared_store_no_request_is_sent(tmp_path: Path) -> None:
    with pytest.raises(StoreMiss):
        Store(tmp_path).open("evaluate", KEY, Said)
    assert not (tmp_path / ".outbox").exists()
