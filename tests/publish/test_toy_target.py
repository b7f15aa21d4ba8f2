"""Test a target from another package: a file and an entry point suffice to publish like to a built-in target."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from target_contract import PROFILE, require_flow_of_releases, target_of

from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.release.publish.releases import check_release
from mergegate.tasks.release.publish.targets import PublishTarget, Target, check_target, find_release, publish_targets
from mergegate.tasks.release.publish.targets import registry as target_registry

PROJECT = Path(__file__).resolve().parents[2]
SHELF = {"to": "shelf", "place": "library"}


def install(site: Path, entry_points: str) -> None:
    """Write the files of an installed package: its module and its metadata."""
    metadata = site / "shelf_for_models-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name("shelf_target.py"), site / "shelf_for_models.py")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-for-models\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[mergegate.targets]\n{entry_points}\n")


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[type[PublishTarget]]:
    """Yield the target of an installed package, which profiles in this process accept until the test ends."""
    install(tmp_path / "site", "shelf = shelf_for_models:ShelfTarget")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "site"))
        publish_targets.cache_clear()
        Profile.model_rebuild(force=True)
        yield publish_targets()["shelf"]
    sys.modules.pop("shelf_for_models")
    importlib.invalidate_caches()
    publish_targets.cache_clear()
    Profile.model_rebuild(force=True)


def test_a_profile_can_name_it_and_its_settings_are_as_strict_as_ours(shelf: type[PublishTarget]) -> None:
    assert target_of(SHELF) == shelf.model_validate(SHELF)
    with pytest.raises(InvalidInput) as misspelt:
        target_of({**SHELF, "plaec": "x"})
    assert str(misspelt.value) == "p: publish.plaec: unknown key 'plaec'\n  remedy:   did you mean 'place'?"
    with pytest.raises(InvalidInput, match=r"p: publish\.place: is missing"):
        target_of({"to": "shelf"})
    with pytest.raises(InvalidInput, match=r"'directory', .*'shelf'"):
        target_of({"to": "shlef"})


def test_a_schema_built_after_installation_includes_the_target(shelf: type[PublishTarget]) -> None:
    class Settings(BaseModel):
        publish: Target

    read = Settings.model_validate({"publish": SHELF})
    assert type(read.publish) is shelf
    assert read.model_dump(mode="json") == {"publish": shelf.model_validate(SHELF).model_dump(mode="json")}


def test_a_problem_with_the_target_is_found_before_the_merge(tmp_path: Path, shelf: type[PublishTarget]) -> None:
    target = target_of(SHELF)
    check_target(target, tmp_path)
    signed = target_of({**SHELF, "sign_key": "release.key"})
    with pytest.raises(InvalidInput, match=r"release\.key: cannot be read: No such file"):
        check_target(signed, tmp_path)
    (tmp_path / "library").write_text("")
    with pytest.raises(Refused, match=r"publish\.place"):
        check_target(target, tmp_path)


@pytest.mark.story
def test_a_release_flows_through_it(
    tmp_path: Path, home: Path, prefect_api: None, monkeypatch: pytest.MonkeyPatch, shelf: type[PublishTarget]
) -> None:
    monkeypatch.chdir(tmp_path)
    target = target_of(SHELF)
    released, later = require_flow_of_releases(target, tmp_path, "is current")
    assert released.label == target.address == "shelf:library"
    assert check_release(find_release("shelf:library"), recompute=True).version == later.version
    with pytest.raises(InvalidInput, match="no such version on this shelf"):
        find_release("shelf:library@v9")


def test_an_unknown_reference_lists_the_forms_of_all_targets(shelf: type[PublishTarget]) -> None:
    with pytest.raises(InvalidInput) as unknown:
        find_release("./nowhere")
    assert unknown.value.found == "no such directory"
    assert unknown.value.expected.startswith("the directory of a release, or org/name@version on the Hub, or ")
    assert unknown.value.expected.endswith(", or shelf:PLACE@VERSION")


@pytest.mark.story
def test_an_installed_package_is_all_that_it_takes(tmp_path: Path) -> None:
    install(tmp_path / "site", "shelf = shelf_for_models:ShelfTarget")
    script = "from mergegate.flows.profile import parse_profile; "
    script += f"print(parse_profile({{**{PROFILE}, 'publish': {SHELF}}}, 'p'))"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{PROJECT}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "ShelfTarget(" in done.stdout


class Point:
    """An installed entry point."""

    name = "extra"

    def __init__(self, value: object) -> None:
        self.load = lambda: value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([3], "3\\n  expected: a PublishTarget"),
        (Path, "<class .*Path.*\\n  expected: a PublishTarget"),
        (PublishTarget, "<class .*PublishTarget.*\\n  expected: a PublishTarget"),
        ([*publish_targets().values()], "the name 'directory' is already in use"),
    ],
)
def test_registered_targets_are_checked(monkeypatch: pytest.MonkeyPatch, value: object, words: str) -> None:
    monkeypatch.setattr(target_registry, "entry_points", lambda group: [Point(value)])
    with pytest.raises(InvalidInput, match=f"entry point mergegate.targets:extra: {words}"):
        publish_targets.__wrapped__()
