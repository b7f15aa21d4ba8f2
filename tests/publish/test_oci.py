"""Test an OCI registry as a target."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import target_contract as contract
from faulty_proxy import faulty_proxy
from forked_publishers import forked_publishers
from real_servers import running_server
from small_registry import PASSWORD, USER, SmallRegistry, small_registry

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.release.publish import ReleaseFile
from mergegate.tasks.release.publish.content import content_version
from mergegate.tasks.release.publish.targets import PublishTarget, Release, check_target, find_release

PROJECT = Path(__file__).resolve().parents[2]
REAL = PROJECT / ".registry" / "usr" / "bin" / "docker-registry"
needs_registry = pytest.mark.skipif(
    not REAL.exists() and "MERGEGATE_REQUIRE_REGISTRY" not in os.environ, reason="make .registry/ready"
)


@contextmanager
def real_registry(place: Path) -> Iterator[str]:
    """Run Debian's docker-registry."""

    def command(port: int) -> list[str]:
        settings = {
            "version": "0.1",
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(place / "data")}},
            "http": {"addr": f"127.0.0.1:{port}"},
        }
        (place / "config.yml").write_text(json.dumps(settings))
        return [str(REAL), "serve", str(place / "config.yml")]

    with running_server(place, command, "/v2/") as url:
        yield url


@pytest.fixture(params=["small", pytest.param("real", marks=[pytest.mark.story, needs_registry])])
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
    return contract.target_of({"to": "oci", "repository": f"{url.removeprefix('http://')}/acme/demo", **settings})


def publish(url: str, files: tuple[ReleaseFile, ...], version: str = "", head: str | None = None) -> Release:
    return contract.publish_files(target(url), files, version, head)


def test_a_release_is_its_digest_and_publishing_again_writes_nothing(url: str, tmp_path: Path) -> None:
    released = publish(url, contract.ONE, "v1")
    assert released.new
    assert str(released.location).partition("@sha256:")[2]
    again = publish(url, contract.ONE, "v1")
    assert (again.location, again.new) == (released.location, False)
    current = contract.current_release(target(url), tmp_path)
    assert current.head == str(released.location).partition("@")[2]
    assert (current.version, current.location) == (content_version(contract.ONE), released.location)
    assert (current.directory / "licenses" / "ä b.txt").read_text() == "terms"
    opened = find_release(str(released.location))
    assert opened.files() == {file.name: (file.size, file.sha256) for file in contract.ONE}
    assert opened.read("model.safetensors") == b"weights"


def test_a_version_never_changes_and_an_overtaken_publisher_publishes_nothing(url: str, tmp_path: Path) -> None:
    contract.require_versions(target(url), tmp_path)
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
    contract.require_gated_bytes(target(url), tmp_path / "w", size)
    assert target(url).current_release(tmp_path) is None


@pytest.mark.story
def test_a_release_flows_through_it(small: SmallRegistry, tmp_path: Path, prefect_api: None) -> None:
    contract.require_flow_of_releases(target(small.url), tmp_path, "is current there now")


def test_downloads_are_compared_with_their_digest(small: SmallRegistry, tmp_path: Path) -> None:
    publish(small.url, contract.ONE)
    small.blobs[f"sha256:{contract.ONE[0].sha256}"] = b"WEIGHTS"
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
        assert publish(registry.url, contract.ONE).new
        registry.tags.clear()
        registry.blobs.clear()
        assert publish(registry.url, contract.ONE).new
        assert target(registry.url).current_release(tmp_path) is not None
    assert PASSWORD not in str(said.value)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        pytest.param("kill", 5, id="kill-some", marks=pytest.mark.story),
        *(pytest.param(kind, 1, marks=pytest.mark.proof) for kind in ("kill", "drop")),
        *(pytest.param(kind, 4, marks=pytest.mark.proof) for kind in ("before", "503", "silence", "down")),
    ],
)
def test_a_fault_at_any_request_leaves_whole_releases_and_is_healed_by_running_again(
    small: SmallRegistry, tmp_path: Path, kind: str, stride: int
) -> None:
    with faulty_proxy(small.url) as proxy, forked_publishers(tmp_path / "warm", "oci") as warm:
        place = {"to": "oci", "repository": f"{proxy.url.removeprefix('http://')}/acme/demo"}
        warm.publish(place, contract.small_release(tmp_path / "old", 1), "v1")
        before, old = (dict(small.blobs), dict(small.manifests), dict(small.tags)), released_files(small)
        files: dict[str, Path] = {}

        def attempt(nth: int, on_start: Any) -> Any:
            small.blobs, small.manifests, small.tags = (dict(one) for one in before)
            files.update(contract.small_release(tmp_path / str(nth), 2))
            return warm.publish(place, files, "v2", on_start=on_start)

        for outcome in contract.attempts_with_fault(proxy, kind, stride, 12, attempt):
            new = {name: path.read_bytes() for name, path in files.items()}
            assert released_files(small) in (old, new)
            contract.require_outcome(outcome, kind)
            assert warm.publish(place, files, "v2")["version"] == "v2"
            assert released_files(small) == new
            assert set(small.tags) == {"v1", "v2", "latest"}


def released_files(registry: SmallRegistry) -> dict[str, bytes]:
    """Return the files that a client pulls as ``latest``."""
    manifest = json.loads(registry.manifests[registry.tags["latest"]])
    return {
        one["annotations"]["org.opencontainers.image.title"]: registry.blobs[one["digest"]]
        for one in manifest["layers"]
    }


def test_an_alias_is_another_tag_of_the_manifest(small: SmallRegistry) -> None:
    for files, version in ((contract.ONE, "v1"), (contract.TWO, "spring"), (contract.TWO, "v2")):
        publish(small.url, files, version)
    with faulty_proxy(small.url) as proxy:
        to = target(proxy.url)
        contract.require_aliases(to, lambda: {**small.tags, contract.ALIAS: ""}, lambda: proxy.written("PUT"))
        assert find_release(f"{to.address}:{contract.ALIAS}").files() == find_release(f"{to.address}:v1").files()
    assert small.tags[contract.ALIAS] == small.tags["v1"]
