"""Test the target in a profile: how mergegate resolves it, and which settings and prerequisites it checks."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from target_contract import target_of

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.release.publish.targets import download, find_release
from mergegate.tasks.release.publish.targets.contract import check_target
from mergegate.tasks.release.publish.targets.directory import DirectoryRelease, DirectoryTarget
from mergegate.tasks.release.publish.targets.hub import HubTarget


def test_the_default_target_is_a_directory() -> None:
    assert target_of({"path": "out"}) == DirectoryTarget(path=Path("out"))
    hub = {"to": "hub", "repo": "acme/demo", "visibility": "public", "gated": "manual"}
    assert target_of(hub) == HubTarget.model_validate(hub)


@pytest.mark.parametrize(
    ("publish", "message"),
    [
        ({"to": "hub"}, "p: publish.repo: is missing"),
        ({"to": "hub", "repo": "acme/demo", "visibilty": "public"}, "did you mean 'visibility'?"),
        ({"to": "directory", "paht": "out", "path": "x"}, "did you mean 'path'?"),
        ({"to": "hub", "repo": "demo"}, "p: publish.repo: 'demo'"),
        ({"to": "hub", "repo": "acme/demo", "gated": "auto"}, "a private repository cannot be gated"),
        ({"to": "hbu", "repo": "acme/demo"}, "'directory', 'hub'"),
        ({"to": "hub", "repo": "acme/demo", "version": "a/b"}, "p: publish.version"),
        ({"to": "s3", "url": "s3://models"}, "p: publish.url"),
        ({"to": "s3", "url": "https://models/demo"}, "p: publish.url"),
        ({"to": "s3", "url": "s3://models/demo", "bucket": "models"}, "unknown key 'bucket'"),
        ({"to": "s3", "url": "s3://models/demo", "endpoint": "http://user:secret@here"}, "p: publish.endpoint"),
        ({"to": "s3", "url": "s3://models/demo", "multipart_threshold": 1}, "p: publish.multipart_threshold"),
        ({"to": "oci", "repository": "demo"}, "p: publish.repository"),
        ({"to": "oci", "repository": "https://ghcr.io/acme/demo"}, "p: publish.repository"),
        ({"to": "oci", "repository": "user:secret@ghcr.io/acme/demo"}, "p: publish.repository"),
    ],
)
def test_an_invalid_setting_is_reported_with_its_field(publish: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        target_of(publish)
    assert message in str(error.value)


def test_a_license_check_for_private_use_does_not_let_a_public_release_through() -> None:
    checks = {"license": {"visibility": "private"}}
    public = {"to": "hub", "repo": "acme/demo", "visibility": "public"}
    with pytest.raises(InvalidInput, match=r"checks\.license\.visibility"):
        target_of(public, checks=checks)
    target_of({"to": "hub", "repo": "acme/demo"}, checks=checks)


def test_a_missing_token_or_key_is_found_before_anything_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    check_target(None, tmp_path)
    check_target(DirectoryTarget(path=Path("out")), tmp_path)
    with pytest.raises(InvalidInput, match="export HF_TOKEN"):
        check_target(HubTarget(to="hub", repo="acme/demo"), tmp_path)
    with pytest.raises(InvalidInput, match=r"release\.key: cannot be read: No such file"):
        check_target(DirectoryTarget(path=Path("out"), sign_key=Path("release.key")), tmp_path)


def test_a_directory_takes_precedence_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="unset HF_HUB_OFFLINE"):
        find_release("acme/demo")
    (tmp_path / "acme" / "demo").mkdir(parents=True)
    assert find_release("acme/demo") == DirectoryRelease(Path("acme/demo"))


def test_an_unknown_reference_lists_the_supported_forms() -> None:
    with pytest.raises(InvalidInput) as unknown:
        find_release("./nowhere")
    assert str(unknown.value) == (
        "./nowhere: no such directory\n"
        "  expected: the directory of a release, or org/name@version on the Hub, or s3://bucket/prefix@version, or "
        "oci://registry/name:version or @sha256:…, or models:/name@champion of MLflow\n"
        "  remedy:   check the spelling, the network, and HF_TOKEN for a private repository"
    )


@pytest.mark.parametrize("floor", ["flows", "tasks"])
def test_only_the_registry_distinguishes_targets(floor: str) -> None:
    project = Path(__file__).resolve().parents[2]
    own = project / "tasks" / "release" / "publish" / "targets"
    asking = [
        str(file.relative_to(project))
        for file in sorted((project / floor).rglob("*.py"))
        if own not in file.parents and re.search(r"\b(Hub|Directory|S3|Oci|Mlflow)Target\b", file.read_text())
    ]
    assert asking == []


@pytest.mark.parametrize("used_meanwhile", [True, False])
def test_a_downloaded_release_is_removed_only_if_no_process_has_used_it_lately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_meanwhile: bool
) -> None:
    def release(data: bytes) -> Path:
        files = {"model.safetensors": (len(data), hashlib.sha256(data).hexdigest())}

        def fetch(name: str, path: Path) -> None:
            path.write_bytes(data)

        return download.download_release("s3://models/demo", files, fetch)

    monkeypatch.setattr(download, "home", lambda: tmp_path)
    old = release(b"old")
    os.utime(old, (1, 1))
    hold = download.hold_lock

    @contextmanager
    def hold_late(path: Path, **options: Any) -> Iterator[None]:
        with hold(path, **options):
            if used_meanwhile and old.name in path.name:
                os.utime(old)  # Another process had the lock and used the release.
            yield

    monkeypatch.setattr(download, "hold_lock", hold_late)
    assert release(b"new").is_dir()
    assert old.is_dir() is used_meanwhile
