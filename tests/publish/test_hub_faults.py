"""Test that after any fault at any request of a publication, running again produces exactly one complete release."""

from __future__ import annotations

import copy
import itertools
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_look_alike import WRITER, Fault, LookAlike, hub
from patience import HANG_S
from publishers import Publishers, publishers

CARD = b"---\nlicense: mit\n---\n# demo\n"
FOREVER = 1 << 30


@pytest.fixture(scope="module")
def transport(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transport]:
    place = tmp_path_factory.mktemp(request.param)
    xet = request.param == "xet"
    with publishers(place / "client", xet=xet) as warm, hub(place / "hub", xet=xet) as stand_in:
        warm.publish(stand_in.url, WRITER, release(place / "old", 1, shards=3), "v1")
        yield Transport(warm, stand_in, stand_in.repository, place)


class Transport:
    """A publisher and a Hub that use LFS or Xet. ``main`` holds a release with three shards."""

    def __init__(self, warm: Publishers, stand_in: LookAlike, old: Any, place: Path) -> None:
        self.warm, self.stand_in, self.old, self.place = warm, stand_in, copy.deepcopy(old), place
        self.count = 0

    def begin(self, *, first: bool) -> dict[str, Path]:
        """Reset to the old release, or to no repository if `first`, and return a new release with two shards."""
        self.count += 1
        self.stand_in.repositories = {} if first else {"acme/demo": copy.deepcopy(self.old)}
        self.stand_in.listings.clear()
        return release(self.place / str(self.count), 2, shards=2)

    def publish(self, files: dict[str, Path], kind: str, nth: int) -> dict[str, Any]:
        """Publish once, with a fault at the nth request."""
        pids: queue.Queue[int] = queue.Queue()
        faults = {
            "none": [],
            "fail": [Fault("fail", nth)],
            "down": [Fault("fail", nth, times=FOREVER)],
            "drop": [Fault("drop", nth)],
            "kill": [Fault("call", nth, call=lambda: os.kill(pids.get(timeout=HANG_S), signal.SIGKILL))],
        }
        self.stand_in.set_faults(faults[kind])
        self.stand_in.log.clear()
        return self.warm.publish(self.stand_in.url, WRITER, files, "v2", on_start=pids.put)


def release(place: Path, number: int, *, shards: int) -> dict[str, Path]:
    """Write the files of a release. No two releases share weights."""
    place.mkdir(parents=True)
    contents = {f"model-{shard:05d}-of-{shards:05d}.safetensors": os.urandom(3000) for shard in range(1, shards + 1)}
    contents |= {"config.json": b'{"number": %d}' % number, "README.md": CARD}
    for name, data in contents.items():
        (place / name).write_bytes(data)
    return {name: place / name for name in contents}


def scenes() -> Iterator[Any]:
    """Yield every fault on both transports, for a first release and for a replacement. The slow suite runs one case."""
    for by, first, kind in itertools.product(("lfs", "xet"), (False, True), ("fail", "down", "drop", "kill")):
        often = (by, first, kind) == ("xet", False, "kill")
        marks = pytest.mark.story if often else pytest.mark.proof
        yield pytest.param(by, first, kind, id=f"{by}-{'first' if first else 'replacing'}-{kind}", marks=marks)


@pytest.mark.parametrize(("transport", "first", "kind"), list(scenes()), indirect=["transport"])
def test_a_fault_at_any_request_is_healed_by_running_again(transport: Transport, kind: str, first: bool) -> None:
    nth = 0
    while True:
        files = transport.begin(first=first)
        attempt = transport.publish(files, kind, nth)
        if nth >= len(transport.stand_in.log):
            break  # the publication finished before the request with the fault
        if kind == "kill":
            assert attempt == {"killed": True}
        transport.publish(files, "none", 0)

        repository = transport.stand_in.repository
        titles = [commit.title for commit in repository.history()]
        assert titles == (["Release v2", "initial commit"] if first else ["Release v2", "Release v1", "initial commit"])
        assert repository.branches == {"main": repository.tags["v2"]}
        assert set(repository.at("main").tree) == {".gitattributes", *files}
        before = {name: file.blob for name, file in repository.history()[1].tree.items()}
        after = {name: file.blob for name, file in repository.at("main").tree.items()}
        partial = [listing for listing in transport.stand_in.listings if listing not in (before, after)]
        assert partial == []
        assert transport.publish(files, "none", 0) == {"commit": repository.tags["v2"], "new": False}
        assert all(entry.method == "GET" for entry in transport.stand_in.log)
        nth += 1
    assert attempt == {"commit": transport.stand_in.repository.tags["v2"], "new": True}
    assert nth >= 20
