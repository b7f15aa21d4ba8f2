"""Test an S3 bucket as a target: releases are complete, one guarded pointer selects the current one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import target_contract as contract
from bucket import AWS, BUCKET, S3OnLoopback, s3_on_loopback
from faulty_proxy import FAULTS
from forked_publishers import ForkedPublishers, forked_publishers
from loopback import Answer, Request
from samples import sampled

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import sha256_file
from mergegate.tasks.base.store import merkle
from mergegate.tasks.release.publish import ReleaseFile
from mergegate.tasks.release.publish.content import content_version, written_file
from mergegate.tasks.release.publish.targets import PublishTarget, Release, check_target, find_release
from mergegate.tasks.release.publish.targets import s3 as publication
from mergegate.tasks.release.publish.targets import s3_access as access

URL = f"s3://{BUCKET}/acme/demo"
LATE = (written_file("model.safetensors", "late"),)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3OnLoopback]:
    access._client.cache_clear()  # The tests share a client, because boto3 needs half a second to create one.
    with s3_on_loopback() as there:
        yield there
    access._client.cache_clear()


@pytest.fixture
def bucket(s3: S3OnLoopback, home: Path, monkeypatch: pytest.MonkeyPatch) -> S3OnLoopback:
    """Return an empty bucket, configured as a user would, without pauses between attempts."""
    for name, value in {**AWS, "AWS_ENDPOINT_URL_S3": s3.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    s3.empty()
    s3.proxy.begin()
    return s3


def target(**settings: Any) -> PublishTarget:
    return contract.target_of({"to": "s3", "url": URL, **settings})


def publish(files: tuple[ReleaseFile, ...], version: str = "", head: str | None = None, **settings: Any) -> Release:
    return contract.publish_files(target(**settings), files, version, head)


def weights_of(files: tuple[ReleaseFile, ...]) -> str:
    return f"acme/demo/{content_version(files)}/model.safetensors"


def pointer_of(bucket: S3OnLoopback) -> Any:
    return json.loads(bucket.read("acme/demo/latest.json"))


def test_a_release_is_stored_under_its_version_and_the_pointer_names_it(bucket: S3OnLoopback, tmp_path: Path) -> None:
    version = content_version(contract.ONE)
    released = publish(contract.ONE)
    assert (released.new, released.location, released.label) == (True, f"{URL}@{version}", URL)
    there = bucket.objects()
    assert there[f"acme/demo/{version}/model.safetensors"] == b"weights"
    assert there[f"acme/demo/{version}/licenses/ä b.txt"] == b"terms"
    assert pointer_of(bucket)["current"] == version
    assert len(there) == 4
    current = contract.current_release(target(), tmp_path)
    assert (current.directory / "licenses" / "ä b.txt").read_text() == "terms"
    assert (current.version, current.location, current.complete) == (version, released.location, True)
    bucket.proxy.begin()
    assert not publish(contract.ONE).new
    assert {request.method for request in bucket.proxy.log} <= {"GET", "HEAD"}
    bucket.proxy.begin()
    assert contract.current_release(target(), tmp_path) == current
    assert len(bucket.proxy.log) == 2  # one request for the pointer and one for the listing


@pytest.mark.story
def test_a_named_version_includes_its_content_hash_and_never_changes(bucket: S3OnLoopback, tmp_path: Path) -> None:
    contract.require_versions(target(), tmp_path)
    for version, files, weights in (("v1", contract.ONE, b"weights"), ("v2", contract.TWO, b"others")):
        assert bucket.read(f"acme/demo/{version}-{content_version(files)}/model.safetensors") == weights
    assert not [key for key in bucket.objects() if f"v1-{content_version(contract.TWO)}" in key]


@pytest.mark.story
def test_one_of_two_concurrent_publishers_is_refused(bucket: S3OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run releases between the last check and the write, so only the store's own guard detects it."""
    publish(contract.ONE)
    write = access.S3Location.write

    def overtaken(self: access.S3Location, name: str, content: bytes, **guard: str) -> bool:
        if name == publication.POINTER:
            monkeypatch.setattr(access.S3Location, "write", write)
            publish(contract.TWO)
        return write(self, name, content, **guard)

    monkeypatch.setattr(access.S3Location, "write", overtaken)
    with pytest.raises(Refused, match=rf"another release \({content_version(contract.TWO)}\) is current there now"):
        publish(LATE)
    assert pointer_of(bucket)["current"] == content_version(contract.TWO)


@pytest.mark.story
def test_an_older_version_is_made_current_again_without_sending_it(bucket: S3OnLoopback) -> None:
    publish(contract.ONE)
    publish(contract.TWO)
    bucket.proxy.begin()
    assert publish(contract.ONE).new
    assert bucket.proxy.written("PUT") == [f"/{BUCKET}/acme/demo/latest.json"]
    assert pointer_of(bucket)["current"] == content_version(contract.ONE)
    versions = [one["version"] for one in pointer_of(bucket)["versions"]]
    assert versions == [content_version(contract.ONE), content_version(contract.TWO)]


@pytest.mark.story
def test_earlier_versions_are_found_by_name_or_as_first(bucket: S3OnLoopback, tmp_path: Path) -> None:
    assert target().earlier_release(tmp_path, "first") is None
    publish(contract.ONE, "v1")
    publish(contract.TWO, "v2")
    earlier = target().earlier_release(tmp_path, "first")
    assert earlier is not None
    assert (earlier.directory / "model.safetensors").read_text() == "weights"
    with pytest.raises(InvalidInput, match="did you mean 'v2'"):
        target().earlier_release(tmp_path, "v22")


@pytest.mark.parametrize("size", sampled([7, 6 << 20], [7]))
def test_altered_files_are_not_published(
    bucket: S3OnLoopback, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "_IN_MEMORY", 0)
    contract.require_gated_bytes(target(multipart_threshold=5 << 20), tmp_path / "w", size)
    assert [key for key in bucket.objects() if "model" in key or "latest" in key] == []
    assert bucket.uploads() == []


@pytest.mark.story
def test_a_large_file_is_sent_in_parts_and_read_once(
    bucket: S3OnLoopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "_PART", 5 << 20)
    data = bytes(range(256)) * (12 << 12)
    (tmp_path / "w").write_bytes(data)
    read: list[int] = []
    reading = ReleaseFile.chunks
    monkeypatch.setattr(ReleaseFile, "chunks", lambda file, part: (read.append(part), reading(file, part))[1])
    file = ReleaseFile("model.safetensors", len(data), sha256_file(tmp_path / "w"), tmp_path / "w")
    publish((file,), multipart_threshold=5 << 20)
    assert read == [5 << 20]
    assert len([request for request in bucket.proxy.log if "partNumber" in request.path]) == 3
    assert bucket.read(weights_of((file,))) == data
    assert not publish((file,), multipart_threshold=5 << 20).new
    assert find_release(URL).files() == {"model.safetensors": (len(data), file.sha256)}


@pytest.mark.story
def test_an_altered_object_is_detected_and_repaired_by_publishing_again(bucket: S3OnLoopback, tmp_path: Path) -> None:
    publish(contract.ONE)
    bucket.write(weights_of(contract.ONE), b"WEIGHTS")
    assert find_release(URL).files()["model.safetensors"][1] != contract.ONE[0].sha256
    with pytest.raises(Refused, match=r"the downloaded files differ from their list: model\.safetensors"):
        target().current_release(tmp_path)
    assert publish(contract.ONE).new
    assert bucket.read(weights_of(contract.ONE)) == b"weights"


@pytest.mark.story
def test_objects_without_checksums_are_downloaded_to_verify(bucket: S3OnLoopback) -> None:
    publish(contract.ONE)
    bucket.client.put_object(Bucket=BUCKET, Key=weights_of(contract.ONE), Body=b"WEIGHTS")
    assert find_release(URL).files()["model.safetensors"][1] == written_file("x", "WEIGHTS").sha256
    bucket.client.put_object(Bucket=BUCKET, Key=weights_of(contract.ONE), Body=b"weights")
    assert not publish(contract.ONE).new


def test_a_store_without_guarded_writes_is_refused(bucket: S3OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_guard(request: Request) -> Answer | None:
        for name in ("if-none-match", "if-match"):
            del request.headers[name]
        return None

    monkeypatch.setattr(bucket.proxy, "refuse", without_guard)
    with pytest.raises(Refused, match="If-None-Match"):
        publish(contract.ONE)
    assert "acme/demo/latest.json" not in bucket.objects()


def test_a_foreign_object_in_a_version_is_refused(bucket: S3OnLoopback) -> None:
    bucket.write(f"acme/demo/{content_version(contract.ONE)}/evil.py", b"import os")
    with pytest.raises(Refused, match=r"evil\.py is among the files"):
        publish(contract.ONE)


@pytest.mark.story
def test_leftovers_of_old_interrupted_runs_are_removed(bucket: S3OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(contract.ONE)
    for path in ("dead", "other-prefix"):
        bucket.write(f"acme/demo/{path}/model.safetensors", b"left")
        bucket.write(f"acme/demo/.listings/{path}.json", b"{}")
    before = set(bucket.objects())
    publish(contract.TWO)
    assert before <= set(bucket.objects()), "they may be of a run that is at work"
    monkeypatch.setattr(access.S3Location, "now", lambda self: datetime.now(UTC) + timedelta(days=8))
    publish(contract.ONE)
    assert {key for key in bucket.objects() if "dead" in key or "other-prefix" in key} == set()
    assert all(bucket.read(weights_of(files)) for files in (contract.ONE, contract.TWO))


def test_missing_prerequisites_are_found_before_the_merge(
    bucket: S3OnLoopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_target(target(), tmp_path)
    assert (bucket.objects(), bucket.uploads()) == ({}, [])
    with pytest.raises(InvalidInput, match=r"s3://nobodys/demo: there is no bucket nobodys"):
        check_target(target(url="s3://nobodys/demo"), tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setattr(access, "_client", access._client.__wrapped__)
    with pytest.raises(InvalidInput, match="no credentials"):
        check_target(target(), tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'mergegate\[s3\]'"):
        check_target(target(), tmp_path)


@pytest.mark.story
def test_a_release_flows_through_it(bucket: S3OnLoopback, tmp_path: Path, prefect_api: None) -> None:
    contract.require_flow_of_releases(target(), tmp_path, "is current there now")
    with pytest.raises(InvalidInput, match="no version nothing"):
        find_release(f"{URL}@nothing")
    with pytest.raises(InvalidInput, match=re.escape("no latest.json at this location")):
        find_release(f"s3://{BUCKET}/elsewhere")


@pytest.mark.story
@pytest.mark.parametrize("kind", FAULTS)
def test_no_message_contains_a_secret(bucket: S3OnLoopback, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(access, "READ_S", 0.2)
    bucket.proxy.begin(replace(FAULTS[kind], times=1 << 30))
    with pytest.raises(Refused, match="run again later") as said:
        publish(contract.ONE)
    assert AWS["AWS_SECRET_ACCESS_KEY"] not in str(said.value)
    assert "Authorization" not in str(said.value)
    assert said.value.__cause__ is None


@pytest.mark.story
def test_an_alias_is_an_object_next_to_the_pointer(bucket: S3OnLoopback) -> None:
    for files, version in ((contract.ONE, "v1"), (contract.TWO, "spring"), (contract.TWO, "v2")):
        publish(files, version)
    there, key = bucket.objects(), f"acme/demo/{contract.ALIAS}.json"
    contract.require_aliases(
        target(),
        lambda: {name: content for name, content in bucket.objects().items() if name != key},
        lambda: bucket.proxy.written("PUT"),
    )
    assert json.loads(bucket.read(key))["version"] == "v1"
    assert find_release(f"{URL}@{contract.ALIAS}").files() == find_release(f"{URL}@v1").files()
    bucket.put_back(there)
    with pytest.raises(InvalidInput, match=f"no version {contract.ALIAS}"):
        find_release(f"{URL}@{contract.ALIAS}")


@pytest.mark.story
def test_an_alias_is_moved_despite_lost_requests_and_concurrent_writers(
    bucket: S3OnLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    for files, version in ((contract.ONE, "v1"), (contract.TWO, "v2")):
        publish(files, version)
    for nth, kind in enumerate(("drop", "503", "before", "drop", "503")):
        bucket.proxy.begin(replace(FAULTS[kind], nth=nth % 4))
        target().set_alias(Path(), version := ("v1", "v2")[nth % 2], contract.ALIAS)
        bucket.proxy.begin()
        assert target().resolve_alias(Path(), contract.ALIAS) == version
    seen: list[str] = []
    read = publication.read_alias

    def overtaken(place: access.S3Location, name: str) -> object:
        """Read the alias and, the first time, move it as another client would before our write."""
        found = read(place, name)
        assert found is not None
        if not seen:
            theirs = found[0].model_copy(update={"version": "theirs"}).model_dump_json().encode()
            assert place.write(f"{name}.json", theirs, IfMatch=found[1])
        seen.append(found[0].version)
        return found

    monkeypatch.setattr(publication, "read_alias", overtaken)
    target().set_alias(Path(), "v2", contract.ALIAS)
    assert seen == ["v1", "theirs", "v2"]
    bucket.write(f"acme/demo/{contract.ALIAS}.json", b"{}")
    with pytest.raises(Refused, match="not an alias of a version"):
        target().set_alias(Path(), "v2", contract.ALIAS)


def released_files(s3: S3OnLoopback) -> dict[str, bytes] | None:
    """Return the release that the pointer selects, after comparing all files with the pointer's digest."""
    there = s3.objects()
    if "acme/demo/latest.json" not in there:
        return None
    pointer = pointer_of(s3)
    (entry,) = (one for one in pointer["versions"] if one["version"] == pointer["current"])
    prefix = f"acme/demo/{entry['path']}/"
    files = {key.removeprefix(prefix): data for key, data in there.items() if key.startswith(prefix)}
    listing = json.loads(there[f"acme/demo/.listings/{entry['path']}.json"])["files"]
    assert {name: len(data) for name, data in files.items()} == {name: size for name, (size, _) in listing.items()}
    assert merkle({name: (size, sha256) for name, (size, sha256) in listing.items()}) == entry["digest"]
    return files


@pytest.fixture(scope="module")
def warm(s3: S3OnLoopback, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPublishers]:
    with forked_publishers(tmp_path_factory.mktemp("warm"), "s3", AWS_ENDPOINT_URL_S3=s3.url) as process:
        yield process


# Lost answers and kills hit every request. Faults without an effect on the server hit only every fourth request.
@pytest.mark.proof
@pytest.mark.parametrize(
    ("first", "kind", "stride"),
    [
        pytest.param(False, "kill", 6, id="next-kill-some", marks=pytest.mark.story),
        pytest.param(True, "500", 4, id="first-500", marks=pytest.mark.story),
        pytest.param(True, "kill", 1, id="first-kill", marks=pytest.mark.proof),
        *(pytest.param(False, kind, 1, id=f"next-{kind}", marks=pytest.mark.proof) for kind in ("drop", "kill")),
        *(
            pytest.param(False, kind, 4, id=f"next-{kind}", marks=pytest.mark.proof)
            for kind in ("down", "before", "503", "silence")
        ),
    ],
)
def test_a_fault_at_any_request_leaves_a_whole_release_and_is_healed_by_running_again(
    s3: S3OnLoopback, warm: ForkedPublishers, tmp_path: Path, first: bool, kind: str, stride: int
) -> None:
    s3.empty()
    s3.proxy.begin()
    place = {"to": "s3", "url": URL}
    if not first:
        warm.publish(place, contract.small_release(tmp_path / "old", 1), "v1")
    before, standing = s3.objects(), released_files(s3)
    files: dict[str, Path] = {}

    def attempt(nth: int, on_start: Any) -> Any:
        s3.put_back(before)
        files.update(contract.small_release(tmp_path / str(nth), 2))
        return warm.publish(place, files, "v2", on_start=on_start)

    for outcome in contract.attempts_with_fault(s3.proxy, kind, stride, 15, attempt):
        new = {name: path.read_bytes() for name, path in files.items()}
        assert released_files(s3) in (standing, new), "half a release"
        contract.require_outcome(outcome, kind)
        assert warm.publish(place, files, "v2")["version"] == "v2"
        assert released_files(s3) == new
        digest = merkle({name: (path.stat().st_size, sha256_file(path)) for name, path in files.items()})
        directory = f"acme/demo/v2-{digest[:12]}"
        listing = f"acme/demo/.listings/v2-{digest[:12]}.json"
        assert {key for key in s3.objects() if "/v2-" in key} == {listing, *(f"{directory}/{name}" for name in files)}
