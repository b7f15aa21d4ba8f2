"""Test publications to a bucket with every fault at any request.

Readers never see a partial release, and running again produces a complete one.
"""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bucket import BUCKET, S3OnLoopback, s3_on_loopback
from faulty_proxy import ProxyFault
from forked_publishers import ForkedPublishers, forked_publishers
from patience import HANG_S

from mergegate.merge_core.files.hashing import sha256_file
from mergegate.tasks.store import merkle

URL = f"s3://{BUCKET}/demo"
TARGET = {"to": "s3", "url": URL}
FOREVER = 1 << 30


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ForkedPublishers, S3OnLoopback]]:
    with (
        s3_on_loopback() as s3,
        forked_publishers(tmp_path_factory.mktemp("warm"), "s3", AWS_ENDPOINT_URL_S3=s3.url) as warm,
    ):
        yield warm, s3


def release(place: Path, number: int) -> dict[str, Path]:
    """Write the files of a release. No two releases share weights."""
    place.mkdir(parents=True)
    contents = {"model.safetensors": os.urandom(3000), "config.json": b'{"number": %d}' % number}
    for name, data in contents.items():
        (place / name).write_bytes(data)
    return {name: place / name for name in contents}


def what_stands(s3: S3OnLoopback) -> dict[str, bytes] | None:
    """Return the release that the pointer selects, after comparing all files with the pointer's digest."""
    there = s3.objects()
    if "demo/latest.json" not in there:
        return None
    pointer = json.loads(there["demo/latest.json"])
    (entry,) = (one for one in pointer["versions"] if one["version"] == pointer["current"])
    prefix = f"demo/{entry['path']}/"
    files = {key.removeprefix(prefix): data for key, data in there.items() if key.startswith(prefix)}
    listing = json.loads(there[f"demo/.listings/{entry['path']}.json"])["files"]
    assert {name: len(data) for name, data in files.items()} == {name: size for name, (size, _) in listing.items()}
    assert merkle({name: (size, sha256) for name, (size, sha256) in listing.items()}) == entry["digest"]
    return files


def scenes() -> Iterator[Any]:
    """Yield faults for a release that replaces another and for a first release."""
    yield pytest.param(False, "kill", 6, id="next-kill-some", marks=pytest.mark.story)
    # Lost answers and kills hit every request. Faults without an effect on the server hit only every fourth request.
    for kind, stride in (("after", 1), ("kill", 1), ("down", 4), ("before", 4), ("503", 4), ("silence", 4)):
        yield pytest.param(False, kind, stride, id=f"next-{kind}", marks=pytest.mark.proof)
    for kind, stride, mark in (("kill", 1, pytest.mark.proof), ("500", 4, pytest.mark.story)):
        yield pytest.param(True, kind, stride, id=f"first-{kind}", marks=mark)


@pytest.mark.parametrize(("first", "kind", "stride"), list(scenes()))
def test_a_fault_at_any_request_leaves_a_whole_release_and_is_healed_by_running_again(
    place: tuple[ForkedPublishers, S3OnLoopback], tmp_path: Path, first: bool, kind: str, stride: int
) -> None:
    warm, s3 = place
    old = None if first else release(tmp_path / "old", 1)
    s3.empty()
    s3.proxy.begin(None)
    if old:
        warm.publish(TARGET, old, "v1")
    before, standing = s3.objects(), what_stands(s3)
    nth = 0
    while True:
        s3.put_back(before)
        files = release(tmp_path / str(nth), 2)
        new = {name: path.read_bytes() for name, path in files.items()}
        pids: queue.Queue[int] = queue.Queue()

        def kill(started: queue.Queue[int] = pids) -> None:
            os.kill(started.get(timeout=HANG_S), signal.SIGKILL)

        fault = {
            "down": ProxyFault("503", nth, times=FOREVER),
            "kill": ProxyFault("call", nth, call=kill),
        }.get(kind, ProxyFault(kind, nth))
        s3.proxy.begin(fault)
        attempt = warm.publish(TARGET, files, "v2", on_start=pids.put)
        if nth >= len(s3.proxy.log):
            break  # the publication finished before the request with the fault
        s3.proxy.begin(None)
        assert what_stands(s3) in (standing, new), "half a release"
        if kind == "kill":
            assert attempt == {"killed": True}
        elif kind == "down":
            assert "run again later" in attempt.get("refused", "") or attempt == {"version": "v2", "new": True}
        else:
            assert attempt == {"version": "v2", "new": True}, "one fault is waited for"
        healed = warm.publish(TARGET, files, "v2")
        assert healed["version"] == "v2"
        assert what_stands(s3) == new
        assert [one for one in s3.objects() if "/v2-" in one] == [f"demo/{path}" for path in _paths(files, "v2")], (
            "nothing but the release"
        )
        nth += stride
    assert attempt == {"version": "v2", "new": True}
    assert nth >= 15


def _paths(files: dict[str, Path], version: str) -> list[str]:
    digest = merkle({name: (path.stat().st_size, sha256_file(path)) for name, path in files.items()})
    path = f"{version}-{digest[:12]}"
    return sorted([f".listings/{path}.json", *(f"{path}/{name}" for name in files)])
