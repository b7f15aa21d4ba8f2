"""Test an OCI registry as a target.

A release is a manifest addressed by its digest. Tags point only to complete releases, and versions never change.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import queue
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from alias_contract import ALIAS, require_aliases
from faulty_proxy import ProxyFault, faulty_proxy
from forked_publishers import forked_publishers
from patience import HANG_S
from release_samples import publishable
from small_registry import PASSWORD, USER, SmallRegistry, small_registry

from mergegate.flows.profile import parse_profile
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints import Model
from mergegate.tasks.publish import ReleaseFile
from mergegate.tasks.publish.content import content_version, written_file
from mergegate.tasks.publish.releases import check_release, load_released_model
from mergegate.tasks.publish.targets import PublishRequest, PublishTarget, Release, check_target, find_release

PROFILE: dict[str, object] = {"name": "demo", "recipe": "x.yaml", "perplexity": {"documents": "held-out.jsonl"}}
ONE = (written_file("model.safetensors", "weights"), written_file("licenses/ä b.txt", "terms"))
TWO = (written_file("model.safetensors", "others"), ONE[1])
PROJECT = Path(__file__).resolve().parents[2]
REAL = PROJECT / ".registry" / "usr" / "bin" / "docker-registry"
FOREVER = 1 << 30


@contextmanager
def real_registry(place: Path) -> Iterator[str]:
    """Run Debian's docker-registry."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(place / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.yml").write_text(json.dumps(settings))
    with (place / "log").open("w") as said:
        process = subprocess.Popen([str(REAL), "serve", str(place / "config.yml")], stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            assert process.poll() is None, (place / "log").read_text()
            try:
                urlopen(f"http://127.0.0.1:{port}/v2/").close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=HANG_S)


@pytest.fixture(
    params=[
        "small",
        pytest.param(
            "real",
            marks=[
                pytest.mark.story,
                pytest.mark.skipif(
                    not REAL.exists() and "MERGEGATE_REQUIRE_REGISTRY" not in os.environ, reason="make .registry/ready"
                ),
            ],
        ),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> Iterator[str]:
    """Yield the URL of an empty registry."""
    if request.param == "real":
        with real_registry(tmp_path / "registry") as there:
            yield there
    else:
        with small_registry() as small:
            yield small.url


@pytest.fixture
def small(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallRegistry]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with small_registry() as registry:
        yield registry


def target(url: str, **settings: Any) -> PublishTarget:
    publish = {"to": "oci", "repository": f"{url.removeprefix('http://')}/acme/demo", **settings}
    made = parse_profile({**PROFILE, "publish": publish}, "p").publish
    assert made is not None
    return made


def publish(url: str, files: tuple[ReleaseFile, ...], version: str = "", head: str | None = None) -> Release:
    return target(url).publish(
        PublishRequest(
            files, "demo", version or content_version(files), Path(), HashMemo(Path("/nonexistent")), expected_head=head
        )
    )


def test_a_release_is_its_digest_and_publishing_again_writes_nothing(url: str, tmp_path: Path) -> None:
    released = publish(url, ONE, "v1")
    assert released.new
    assert str(released.location).partition("@sha256:")[2]
    again = publish(url, ONE, "v1")
    assert (again.location, again.new) == (released.location, False)
    current = target(url).current_release(tmp_path)
    assert current is not None
    assert current.head == str(released.location).partition("@")[2]
    assert (current.version, current.location) == (content_version(ONE), released.location)
    assert (current.directory / "licenses" / "ä b.txt").read_text() == "terms"
    opened = find_release(str(released.location))
    assert opened.files() == {file.name: (file.size, file.sha256) for file in ONE}
    assert opened.read("model.safetensors") == b"weights"


def test_a_version_never_changes_and_an_overtaken_publisher_publishes_nothing(url: str, tmp_path: Path) -> None:
    publish(url, ONE, "v1")
    with pytest.raises(Refused, match="already published with other content"):
        publish(url, TWO, "v1")
    compared_with = target(url).current_release(tmp_path)
    assert compared_with is not None
    publish(url, TWO, "v2", head=compared_with.head)
    with pytest.raises(Refused, match="is current there now"):
        publish(url, (written_file("model.safetensors", "late"),), "v3", head=compared_with.head)
    assert publish(url, ONE, "v1").new, "it is current again"
    earlier = target(url).earlier_release(tmp_path, "v2")
    assert earlier is not None
    assert (earlier.directory / "model.safetensors").read_text() == "others"
    with pytest.raises(InvalidInput, match="no tag 'v9'"):
        target(url).earlier_release(tmp_path, "v9")
    with pytest.raises(Refused, match="does not store the order of its tags"):
        target(url).earlier_release(tmp_path, "first")


def test_write_access_is_checked_without_a_trace(url: str, tmp_path: Path) -> None:
    check_target(target(url), tmp_path)
    with pytest.raises(InvalidInput, match="no such tag"):
        find_release(target(url).address)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [7, 3 << 20])
def test_altered_files_are_not_published(url: str, tmp_path: Path, size: int) -> None:
    (tmp_path / "w").write_bytes(b"x" * size)
    gated = written_file("model.safetensors", "w" * size)
    with pytest.raises(Refused, match="the bytes that were evaluated and gated"):
        publish(url, (ReleaseFile(gated.name, gated.size, gated.sha256, tmp_path / "w"),), "v1")
    assert target(url).current_release(tmp_path) is None


def test_a_release_flows_through_it(small: SmallRegistry, tmp_path: Path, prefect_api: None) -> None:
    one = publishable(tmp_path / "one")
    place, hashes = target(small.url), HashMemo(tmp_path / "hashes.sqlite")
    merge = Model(name="merge", digest="d" * 64, directory=one.merged.directory)
    assert load_released_model(place, tmp_path, merge, hashes) is None
    released = one.publish(place, tmp_path)
    champion = load_released_model(place, tmp_path, merge, hashes)
    assert champion is not None
    assert champion.digest == merge.digest
    assert f"mergegate verify {place.address}" in (champion.directory / "README.md").read_text()
    verified = check_release(find_release(f"{place.address}:{released.version}"), recompute=True)
    assert verified.version == released.version


def test_downloads_are_compared_with_their_digest(small: SmallRegistry, tmp_path: Path) -> None:
    publish(small.url, ONE)
    small.blobs[f"sha256:{ONE[0].sha256}"] = b"WEIGHTS"
    with pytest.raises(Refused, match="the downloaded files differ from their list"):
        target(small.url).current_release(tmp_path)
    with pytest.raises(Refused, match="bytes that do not match the digest"):
        find_release(target(small.url).address).read("model.safetensors")


def test_a_foreign_manifest_is_refused(small: SmallRegistry, tmp_path: Path) -> None:
    image = json.dumps({"schemaVersion": 2, "config": {}, "layers": []}).encode()
    small.manifests["sha256:" + hashlib.sha256(image).hexdigest()] = image
    small.tags["latest"] = "sha256:" + hashlib.sha256(image).hexdigest()
    with pytest.raises(Refused, match="not a release of mergegate"):
        target(small.url).current_release(tmp_path)


def test_a_login_of_docker_is_used_and_never_shown(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with small_registry(login=True) as registry:
        with pytest.raises(Refused, match=r"docker login 127\.0\.0\.1") as said:
            check_target(target(registry.url), tmp_path)
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        host = registry.url.removeprefix("http://")
        (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
        check_target(target(registry.url), tmp_path)
        assert publish(registry.url, ONE).new
        registry.tags.clear()
        registry.blobs.clear()
        assert publish(registry.url, ONE).new
        assert target(registry.url).current_release(tmp_path) is not None
    assert PASSWORD not in str(said.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repository": "demo"}, r"p: publish\.repository"),
        ({"repository": "https://ghcr.io/acme/demo"}, r"p: publish\.repository"),
        ({"repository": "user:secret@ghcr.io/acme/demo"}, r"p: publish\.repository"),
    ],
)
def test_an_invalid_setting_is_reported_with_its_field(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        target("", **settings)


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        pytest.param("kill", 5, id="kill-some", marks=pytest.mark.story),
        *(pytest.param(kind, 1, marks=pytest.mark.proof) for kind in ("kill", "after")),
        *(pytest.param(kind, 4, marks=pytest.mark.proof) for kind in ("before", "503", "silence", "down")),
    ],
)
def test_a_fault_at_any_request_leaves_whole_releases_and_is_healed_by_running_again(
    small: SmallRegistry, tmp_path: Path, kind: str, stride: int
) -> None:
    with faulty_proxy(small.url) as proxy, forked_publishers(tmp_path / "warm", "oci") as warm:
        place = {"to": "oci", "repository": f"{proxy.url.removeprefix('http://')}/acme/demo"}
        old = _written(tmp_path / "old", 1)
        warm.publish(place, old, "v1")
        before, nth = (dict(small.blobs), dict(small.manifests), dict(small.tags)), 0
        while True:
            small.blobs, small.manifests, small.tags = (dict(one) for one in before)
            new = _written(tmp_path / str(nth), 2)
            pids: queue.Queue[int] = queue.Queue()

            def kill(started: queue.Queue[int] = pids) -> None:
                os.kill(started.get(timeout=HANG_S), signal.SIGKILL)

            fault = {
                "down": ProxyFault("503", nth, times=FOREVER),
                "kill": ProxyFault("call", nth, call=kill),
            }.get(kind, ProxyFault(kind, nth))
            proxy.begin(fault)
            attempt = warm.publish(place, new, "v2", on_start=pids.put)
            if nth >= len(proxy.log):
                break
            proxy.begin(None)
            contents = {name: path.read_bytes() for name, path in new.items()}
            assert _standing(small) in ({name: path.read_bytes() for name, path in old.items()}, contents)
            if kind == "kill":
                assert attempt == {"killed": True}
            elif kind == "down":
                assert "run again later" in attempt["refused"]
            else:
                assert attempt == {"version": "v2", "new": True}, "one fault is waited for"
            assert warm.publish(place, new, "v2")["version"] == "v2"
            assert _standing(small) == contents
            assert set(small.tags) == {"v1", "v2", "latest"}
            nth += stride
        assert attempt == {"version": "v2", "new": True}
        assert nth >= 12


def _written(place: Path, number: int) -> dict[str, Path]:
    place.mkdir()
    contents = {"model.safetensors": os.urandom(3000), "config.json": b'{"number": %d}' % number}
    for name, data in contents.items():
        (place / name).write_bytes(data)
    return {name: place / name for name in contents}


def _standing(registry: SmallRegistry) -> dict[str, bytes]:
    """Return the files that a client pulls as ``latest``."""
    manifest = json.loads(registry.manifests[registry.tags["latest"]])
    return {
        one["annotations"]["org.opencontainers.image.title"]: registry.blobs[one["digest"]]
        for one in manifest["layers"]
    }


def test_an_alias_is_another_tag_of_the_manifest(small: SmallRegistry) -> None:
    for files, version in ((ONE, "v1"), (TWO, "spring"), (TWO, "v2")):
        publish(small.url, files, version)
    with faulty_proxy(small.url) as proxy:
        to = target(proxy.url)
        require_aliases(
            to,
            lambda: {**small.tags, ALIAS: ""},
            lambda: [path for method, path in proxy.log if method == "PUT"],
        )
        assert find_release(f"{to.address}:{ALIAS}").files() == find_release(f"{to.address}:v1").files()
    assert small.tags[ALIAS] == small.tags["v1"]
