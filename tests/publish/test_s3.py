"""Test an S3 bucket as a target: releases are complete, one guarded pointer selects the current one.

Every byte is verified by the object store's own checksum.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from alias_contract import ALIAS, require_aliases
from bucket import BUCKET, S3OnLoopback, s3_on_loopback
from faulty_proxy import ProxyFault
from forked_publishers import AWS
from release_samples import publishable

from mergegate.flows.profile import parse_profile
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints import Model
from mergegate.tasks.publish import ReleaseFile
from mergegate.tasks.publish.content import content_version, written_file
from mergegate.tasks.publish.releases import check_release, load_released_model
from mergegate.tasks.publish.targets import (
    PublishRequest,
    PublishTarget,
    Release,
    check_target,
    find_release,
    publish_targets,
)
from mergegate.tasks.publish.targets import s3_access as access
from mergegate.tasks.publish.targets import s3_publication as publication
from mergegate.tasks.publish.targets import s3_release as aliases
from mergegate.tasks.publish.targets.s3_state import POINTER

PROFILE: dict[str, object] = {"name": "demo", "recipe": "x.yaml", "perplexity": {"documents": "held-out.jsonl"}}
URL = f"s3://{BUCKET}/acme/demo"
ONE = (written_file("model.safetensors", "weights"), written_file("licenses/ä b.txt", "terms"))
TWO = (written_file("model.safetensors", "others"), ONE[1])


@pytest.fixture(scope="module")
def s3() -> Iterator[S3OnLoopback]:
    with s3_on_loopback() as there:
        yield there


@pytest.fixture
def bucket(s3: S3OnLoopback, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3OnLoopback]:
    """Yield an empty bucket, configured as a user would, without pauses between attempts."""
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    access._client.cache_clear()
    s3.empty()
    s3.proxy.begin(None)
    yield s3
    access._client.cache_clear()


def target(**settings: Any) -> PublishTarget:
    made = parse_profile({**PROFILE, "publish": {"to": "s3", "url": URL, **settings}}, "p").publish
    assert made is not None
    return made


def publish(files: tuple[ReleaseFile, ...], version: str = "", head: str | None = None, **settings: Any) -> Release:
    return target(**settings).publish(
        PublishRequest(
            files, "demo", version or content_version(files), Path(), HashMemo(Path("/nonexistent")), expected_head=head
        )
    )


def test_a_release_is_stored_under_its_version_and_the_pointer_names_it(bucket: S3OnLoopback, tmp_path: Path) -> None:
    version = content_version(ONE)
    released = publish(ONE)
    assert (released.new, released.location, released.label) == (True, f"{URL}@{version}", URL)
    there = bucket.objects()
    assert there[f"acme/demo/{version}/model.safetensors"] == b"weights"
    assert there[f"acme/demo/{version}/licenses/ä b.txt"] == b"terms"
    assert json.loads(there["acme/demo/latest.json"])["current"] == version
    assert len(there) == 4
    current = target().current_release(tmp_path)
    assert current is not None
    assert (current.directory / "licenses" / "ä b.txt").read_text() == "terms"
    assert (current.version, current.location, current.complete) == (version, released.location, True)


def test_publishing_again_writes_nothing(bucket: S3OnLoopback) -> None:
    publish(ONE)
    bucket.proxy.begin(None)
    assert not publish(ONE).new
    assert {method for method, _ in bucket.proxy.log} <= {"GET", "HEAD"}


def test_a_named_version_includes_its_content_hash_and_never_changes(bucket: S3OnLoopback) -> None:
    publish(ONE, "v1")
    assert f"acme/demo/v1-{content_version(ONE)}/model.safetensors" in bucket.objects()
    before = bucket.objects()
    with pytest.raises(Refused, match="already published with other content"):
        publish(TWO, "v1")
    assert bucket.objects() == before


def test_an_overtaken_publisher_publishes_nothing(bucket: S3OnLoopback, tmp_path: Path) -> None:
    publish(ONE)
    compared_with = target().current_release(tmp_path)
    assert compared_with is not None
    publish(TWO, head=compared_with.head)
    late = (written_file("model.safetensors", "late"),)
    with pytest.raises(Refused, match="compared with") as overtaken:
        publish(late, head=compared_with.head)
    assert content_version(TWO) in overtaken.value.found
    assert json.loads(bucket.read("acme/demo/latest.json"))["current"] == content_version(TWO)


def test_one_of_two_concurrent_publishers_is_refused(bucket: S3OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run releases between the last check and the write, so only the store's own guard detects it."""
    publish(ONE)
    write = access.S3Location.write

    def overtaken(self: access.S3Location, name: str, content: bytes, **guard: str) -> bool:
        if name == POINTER:
            monkeypatch.setattr(access.S3Location, "write", write)
            publish(TWO)
        return write(self, name, content, **guard)

    monkeypatch.setattr(access.S3Location, "write", overtaken)
    with pytest.raises(Refused, match="is current there now"):
        publish((written_file("model.safetensors", "late"),))
    assert json.loads(bucket.read("acme/demo/latest.json"))["current"] == content_version(TWO)


def test_an_older_version_is_made_current_again_without_sending_it(bucket: S3OnLoopback) -> None:
    publish(ONE)
    publish(TWO)
    bucket.proxy.begin(None)
    assert publish(ONE).new
    assert [path for method, path in bucket.proxy.log if method == "PUT"] == [f"/{BUCKET}/acme/demo/latest.json"]
    pointer = json.loads(bucket.read("acme/demo/latest.json"))
    assert pointer["current"] == content_version(ONE)
    assert [one["version"] for one in pointer["versions"]] == [content_version(ONE), content_version(TWO)]


def test_earlier_versions_are_found_by_name_or_as_first(bucket: S3OnLoopback, tmp_path: Path) -> None:
    assert target().earlier_release(tmp_path, "first") is None
    publish(ONE, "v1")
    publish(TWO, "v2")
    for named in ("first", "v1"):
        earlier = target().earlier_release(tmp_path, named)
        assert earlier is not None
        assert (earlier.directory / "model.safetensors").read_text() == "weights"
    with pytest.raises(InvalidInput, match="did you mean 'v2'"):
        target().earlier_release(tmp_path, "v22")


@pytest.mark.parametrize("large", [False, True])
def test_altered_files_are_not_published(
    bucket: S3OnLoopback, tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "_IN_MEMORY", 0)
    data = b"w" * (6 << 20 if large else 7)
    (tmp_path / "w").write_bytes(b"x" + data[1:])
    gated = written_file("model.safetensors", data.decode())
    altered = ReleaseFile(gated.name, gated.size, gated.sha256, tmp_path / "w")
    with pytest.raises(Refused, match="the bytes that were evaluated and gated"):
        publish((altered,), multipart_threshold=5 << 20)
    assert [key for key in bucket.objects() if "model" in key or "latest" in key] == []
    assert bucket.uploads() == []


def test_a_large_file_is_sent_in_parts_and_read_once(
    bucket: S3OnLoopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "_PART", 5 << 20)
    data = bytes(range(256)) * (12 << 12)
    (tmp_path / "w").write_bytes(data)
    gated = written_file("model.safetensors", data.decode("latin-1"))
    read: list[int] = []
    reading = publication._read
    monkeypatch.setattr(publication, "_read", lambda file, part: (read.append(part), reading(file, part))[1])
    file = ReleaseFile("model.safetensors", len(data), _sha256(tmp_path / "w"), tmp_path / "w")
    assert gated.name == file.name
    publish((file,), multipart_threshold=5 << 20)
    assert read == [5 << 20]
    assert len([path for method, path in bucket.proxy.log if "partNumber" in path]) == 3
    assert bucket.read(f"acme/demo/{content_version((file,))}/model.safetensors") == data
    assert not publish((file,), multipart_threshold=5 << 20).new
    assert find_release(URL).files() == {"model.safetensors": (len(data), file.sha256)}


def test_an_altered_object_is_detected_and_repaired_by_publishing_again(bucket: S3OnLoopback) -> None:
    publish(ONE)
    key = f"acme/demo/{content_version(ONE)}/model.safetensors"
    bucket.write(key, b"WEIGHTS")
    assert find_release(URL).files()["model.safetensors"][1] != ONE[0].sha256
    assert publish(ONE).new
    assert bucket.read(key) == b"weights"


def test_objects_without_checksums_are_downloaded_to_verify(bucket: S3OnLoopback) -> None:
    publish(ONE)
    key = f"acme/demo/{content_version(ONE)}/model.safetensors"
    bucket.client.put_object(Bucket=BUCKET, Key=key, Body=b"WEIGHTS")
    assert find_release(URL).files()["model.safetensors"][1] == written_file("x", "WEIGHTS").sha256
    bucket.client.put_object(Bucket=BUCKET, Key=key, Body=b"weights")
    assert not publish(ONE).new


def test_a_store_without_guarded_writes_is_refused(bucket: S3OnLoopback) -> None:
    def without_guard(method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        for name in [name for name in headers if name.lower() in ("if-none-match", "if-match")]:
            del headers[name]

    guarding, bucket.proxy.refuse = bucket.proxy.refuse, without_guard  # type: ignore[assignment]
    try:
        with pytest.raises(Refused, match="If-None-Match"):
            publish(ONE)
    finally:
        bucket.proxy.refuse = guarding
    assert "acme/demo/latest.json" not in bucket.objects()


def test_a_foreign_object_in_a_version_is_refused(bucket: S3OnLoopback) -> None:
    bucket.write(f"acme/demo/{content_version(ONE)}/evil.py", b"import os")
    with pytest.raises(Refused, match=r"evil\.py is among the files"):
        publish(ONE)


def test_a_downloaded_release_is_compared_with_what_was_published(bucket: S3OnLoopback, tmp_path: Path) -> None:
    publish(ONE)
    bucket.write(f"acme/demo/{content_version(ONE)}/model.safetensors", b"WEIGHTS")
    with pytest.raises(Refused, match=r"the downloaded files differ from their list: model\.safetensors"):
        target().current_release(tmp_path)


def test_a_champion_is_downloaded_once(bucket: S3OnLoopback, tmp_path: Path) -> None:
    publish(ONE)
    first = target().current_release(tmp_path)
    bucket.proxy.begin(None)
    assert target().current_release(tmp_path) == first
    assert len(bucket.proxy.log) == 2  # one request for the pointer and one for the listing


def test_leftovers_of_old_interrupted_runs_are_removed(bucket: S3OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(ONE)
    for path in ("dead", "other-prefix"):
        bucket.write(f"acme/demo/{path}/model.safetensors", b"left")
        bucket.write(f"acme/demo/.listings/{path}.json", b"{}")
    before = set(bucket.objects())
    publish(TWO)
    assert before <= set(bucket.objects()), "they may be of a run that is at work"
    monkeypatch.setattr(access.S3Location, "now", lambda self: datetime.now(UTC) + timedelta(days=8))
    publish(ONE)
    assert {key for key in bucket.objects() if "dead" in key or "other-prefix" in key} == set()
    for files in (ONE, TWO):
        assert bucket.read(f"acme/demo/{content_version(files)}/model.safetensors")


def test_missing_prerequisites_are_found_before_the_merge(
    bucket: S3OnLoopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_target(target(), tmp_path)
    assert bucket.objects() == {}
    assert bucket.uploads() == []
    with pytest.raises(InvalidInput, match=r"s3://nobodys/demo: there is no bucket nobodys"):
        check_target(target(url="s3://nobodys/demo"), tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    access._client.cache_clear()
    with pytest.raises(InvalidInput, match="no credentials"):
        check_target(target(), tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'mergegate\[s3\]'"):
        check_target(target(), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "s3://models"}, r"p: publish\.url"),
        ({"url": "https://models/demo"}, r"p: publish\.url"),
        ({"bucket": "models"}, "unknown key 'bucket'"),
        ({"endpoint": "http://user:secret@here"}, r"p: publish\.endpoint"),
        ({"multipart_threshold": 1}, r"p: publish\.multipart_threshold"),
    ],
)
def test_an_invalid_setting_is_reported_with_its_field(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        target(**settings)


@pytest.mark.story
def test_a_release_flows_through_it(bucket: S3OnLoopback, home: Path, tmp_path: Path, prefect_api: None) -> None:
    one, two = publishable(tmp_path / "one"), publishable(tmp_path / "two", weights=b"others")
    place, hashes = target(), HashMemo(tmp_path / "hashes.sqlite")
    merge = Model(name="merge", digest="d" * 64, directory=one.merged.directory)
    assert load_released_model(place, tmp_path, merge, hashes) is None
    released = one.publish(place, tmp_path)
    champion = load_released_model(place, tmp_path, merge, hashes)
    assert champion is not None
    assert champion.digest == merge.digest
    assert f"mergegate verify {URL}" in (champion.directory / "README.md").read_text()
    two.publish(place, tmp_path, expected_head=champion.head)
    with pytest.raises(Refused, match="is current there now"):
        publishable(tmp_path / "three", weights=b"late").publish(place, tmp_path, expected_head=champion.head)
    for named in (URL, f"{URL}@{released.version}"):
        verified = check_release(find_release(named), recompute=True)
        assert verified.reference.startswith(URL)
    with pytest.raises(InvalidInput, match="no version nothing"):
        find_release(f"{URL}@nothing")
    with pytest.raises(InvalidInput, match=re.escape("no latest.json at this location")):
        find_release(f"s3://{BUCKET}/elsewhere")


@pytest.mark.story
def test_no_message_contains_a_secret(bucket: S3OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "READ_S", 0.2)
    from faulty_proxy import FAULTS, ProxyFault

    for kind in FAULTS:
        bucket.proxy.begin(ProxyFault(kind, 0, times=1 << 30))
        with pytest.raises(Refused, match="run again later") as said:
            publish(ONE)
        assert AWS["AWS_SECRET_ACCESS_KEY"] not in str(said.value)
        assert "Authorization" not in str(said.value)
    assert said.value.__cause__ is None


def test_it_is_one_of_the_targets() -> None:
    assert "s3" in publish_targets()


def _sha256(path: Path) -> str:
    from mergegate.merge_core.files.hashing import sha256_file

    return sha256_file(path)


@pytest.mark.story
def test_an_alias_is_an_object_next_to_the_pointer(bucket: S3OnLoopback) -> None:
    for files, version in ((ONE, "v1"), (TWO, "spring"), (TWO, "v2")):
        publish(files, version)
    there, key = bucket.objects(), f"acme/demo/{ALIAS}.json"
    require_aliases(
        target(),
        lambda: {name: content for name, content in bucket.objects().items() if name != key},
        lambda: [path for method, path in bucket.proxy.log if method == "PUT"],
    )
    assert json.loads(bucket.read(key))["version"] == "v1"
    assert find_release(f"{URL}@{ALIAS}").files() == find_release(f"{URL}@v1").files()
    bucket.put_back(there)
    with pytest.raises(InvalidInput, match=f"no version {ALIAS}"):
        find_release(f"{URL}@{ALIAS}")


@pytest.mark.story
def test_an_alias_is_moved_despite_lost_requests_and_concurrent_writers(
    bucket: S3OnLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    for files, version in ((ONE, "v1"), (TWO, "v2")):
        publish(files, version)
    for nth, kind in enumerate(("after", "503", "before", "after", "503")):
        bucket.proxy.begin(ProxyFault(kind, nth % 4))
        target().set_alias(Path(), version := ("v1", "v2")[nth % 2], ALIAS)
        bucket.proxy.begin(None)
        assert target().resolve_alias(Path(), ALIAS) == version
    seen: list[str] = []
    read = aliases.read_alias

    def overtaken(place: access.S3Location, name: str) -> object:
        """Read the alias and, the first time, move it as another client would before our write."""
        found = read(place, name)
        assert found is not None
        if not seen:
            theirs = found[0].model_copy(update={"version": "theirs"}).model_dump_json().encode()
            assert place.write(f"{name}.json", theirs, IfMatch=found[1])
        seen.append(found[0].version)
        return found

    monkeypatch.setattr(aliases, "read_alias", overtaken)
    target().set_alias(Path(), "v2", ALIAS)
    assert seen == ["v1", "theirs", "v2"]
    bucket.write(f"acme/demo/{ALIAS}.json", b"{}")
    with pytest.raises(Refused, match="not an alias of a version"):
        target().set_alias(Path(), "v2", ALIAS)
