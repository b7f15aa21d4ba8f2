"""Check the contract that every target must fulfill. Each target's tests call this with their own stand-in."""

from __future__ import annotations

import itertools
import os
import queue
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import FAULTS
from loopback import FakeServer, Fault
from patience import HANG_S
from release_samples import publishable

from mergegate.flows.profile import parse_profile
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.models.checkpoints import Model
from mergegate.tasks.release.publish.content import ReleaseFile, content_version, written_file
from mergegate.tasks.release.publish.releases import check_release, load_released_model
from mergegate.tasks.release.publish.targets import CurrentRelease, PublishRequest, PublishTarget, Release, find_release

ALIAS = "production"
PROFILE: dict[str, object] = {"name": "demo", "recipe": "x.yaml", "perplexity": {"documents": "held-out.jsonl"}}
ONE = (written_file("model.safetensors", "weights"), written_file("licenses/ä b.txt", "terms"))
TWO = (written_file("model.safetensors", "others"), ONE[1])


def target_of(publish: dict[str, object], **profile: object) -> PublishTarget:
    """Return the target of a profile with these settings."""
    target = parse_profile({**PROFILE, **profile, "publish": publish}, "p").publish
    assert target is not None
    return target


def publish_files(
    target: PublishTarget, files: tuple[ReleaseFile, ...], version: str = "", head: str | None = None
) -> Release:
    """Publish as the publish step does. The default version is the content."""
    hashes = HashMemo(Path("/nonexistent"))
    return target.publish(PublishRequest(files, "demo", version or content_version(files), Path(), hashes, head))


def current_release(target: PublishTarget, root: Path) -> CurrentRelease:
    current = target.current_release(root)
    assert current is not None
    return current


def require_aliases(target: PublishTarget, held: Callable[[], object], writes: Callable[[], object]) -> None:
    """Assert that an alias moves between versions and that nothing else changes.

    Args:
        target: Target where ``v1``, ``spring`` and ``v2`` were published in this order, without any alias.
        held: Function that returns everything at the target except the alias ``production``.
        writes: Function whose result changes with each request that writes.
    """
    root, before = Path(), held()
    assert target.resolve_alias(root, ALIAS) is None
    for version in ("v1", "v2", "spring", "v1"):
        target.set_alias(root, version, ALIAS)
        assert target.resolve_alias(root, ALIAS) == version
        written = writes()
        target.set_alias(root, version, ALIAS)
        assert writes() == written, "it was there already"
    with pytest.raises(InvalidInput, match="no version 'v3'"):
        target.set_alias(root, "v3", ALIAS)
    for name in ("spring", "v2", "main.1", "", "../v1", "latest" if target.target_name != "hub" else "main"):
        if (target.target_name, name) == ("mlflow", "spring"):
            continue  # in MLflow a version is a number, and `spring` is an alias
        with pytest.raises(InvalidInput, match=r"shadow\.alias"):
            target.set_alias(root, "v1", name)
    assert target.resolve_alias(root, ALIAS) == "v1"
    assert held() == before


def require_flow_of_releases(target: PublishTarget, root: Path, overtaken: str) -> tuple[Release, Release]:
    """Assert that a run can publish, read the champion, and publish the next release, and return both releases."""
    one, two = publishable(root / "one"), publishable(root / "two", weights=b"others")
    hashes = HashMemo(root / "hashes.sqlite")
    merge = Model(name="merge", digest="d" * 64, directory=one.merged.directory)
    assert load_released_model(target, root, merge, hashes) is None
    released = one.publish(target, root)
    assert (released.name, released.new) == ("demo", True)
    again = one.publish(target, root)
    assert (again.version, again.new) == (released.version, False)
    champion = load_released_model(target, root, merge, hashes)
    assert champion is not None
    assert champion.digest == merge.digest
    assert (champion.directory / "model.safetensors").read_bytes() == b"weights"
    assert f"mergegate verify {target.address}" in (champion.directory / "README.md").read_text()
    later = two.publish(target, root, expected_head=champion.head)
    assert later.new
    with pytest.raises(Refused, match=overtaken):
        publishable(root / "three", weights=b"late").publish(target, root, expected_head=champion.head)
    assert check_release(find_release(str(target.address)), recompute=True).signed == "none"
    for version in (released.version, later.version):
        assert check_release(find_release(target.reference_to(version)), recompute=True).version == version
    return released, later


def require_versions(target: PublishTarget, root: Path) -> None:
    """Assert that a version never changes, and that a publisher that was overtaken publishes nothing."""
    publish_files(target, ONE, "v1")
    with pytest.raises(Refused, match="already published with other content"):
        publish_files(target, TWO, "v1")
    compared_with = current_release(target, root)
    assert (compared_with.directory / "licenses" / "ä b.txt").read_text() == "terms"
    publish_files(target, TWO, "v2", compared_with.head)
    with pytest.raises(Refused, match="is current there now"):
        publish_files(target, (written_file("model.safetensors", "late"),), "v3", compared_with.head)
    assert (current_release(target, root).directory / "model.safetensors").read_text() == "others"
    assert publish_files(target, ONE, "v1").new, "it is current again"
    earlier = target.earlier_release(root, "v2")
    assert earlier is not None
    assert (earlier.directory / "model.safetensors").read_text() == "others"


def require_gated_bytes(target: PublishTarget, file: Path, size: int) -> None:
    """Assert that a file that was altered after the gate is not published."""
    file.write_bytes(b"x" + b"w" * (size - 1))
    gated = written_file("model.safetensors", "w" * size)
    with pytest.raises(Refused, match="the bytes that were evaluated and gated"):
        publish_files(target, (replace(gated, source=file),), "v1")


def small_release(directory: Path, number: int, shards: int = 1) -> dict[str, Path]:
    """Write the files of a release, and return their paths by name. No two releases share weights."""
    directory.mkdir(parents=True)
    names = [f"model-{shard:05d}-of-{shards:05d}.safetensors" for shard in range(1, shards + 1)]
    contents = {name: os.urandom(3000) for name in names} | {"config.json": b'{"number": %d}' % number}
    contents |= {"README.md": b"---\nlicense: mit\n---\n# demo\n"}
    for name, data in contents.items():
        (directory / name).write_bytes(data)
    return {name: directory / name for name in contents}


def attempts_with_fault(
    server: FakeServer, kind: str, stride: int, least: int, publish: Callable[[int, Callable[[int], None]], Any]
) -> Iterator[Any]:
    """Call ``publish`` with a fault at every ``stride``-th request of the server, and yield the outcomes.

    The last call, which ends before the fault, is not yielded: it must publish ``v2``, after at least ``least``
    requests. ``publish`` receives the index of the request and a function that takes the ID of the process to kill.
    """
    for nth in itertools.count(step=stride):
        pids: queue.Queue[int] = queue.Queue()

        def kill(started: queue.Queue[int] = pids) -> None:
            os.kill(started.get(timeout=HANG_S), signal.SIGKILL)

        server.begin(Fault("call", nth, call=kill) if kind == "kill" else replace(FAULTS[kind], nth=nth))
        outcome = publish(nth, pids.put)
        if nth >= len(server.log):
            assert (outcome.get("version", "v2"), outcome["new"]) == ("v2", True)
            assert nth >= least
            return
        server.begin()
        yield outcome


def require_outcome(outcome: dict[str, Any], kind: str) -> None:
    """Assert that a single fault is waited for, and that a target that is down is reported."""
    if kind == "kill":
        assert outcome == {"killed": True}
    elif kind == "down":
        assert "run again later" in outcome.get("refused", "") or outcome == {"version": "v2", "new": True}
    else:
        assert outcome == {"version": "v2", "new": True}
