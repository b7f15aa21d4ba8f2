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
from release_samples import publishable

from mergegate.flows.profile import Profile, parse_profile
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints import Model
from mergegate.tasks.publish.releases import check_release, load_released_model
from mergegate.tasks.publish.targets import PublishTarget, Target, check_target, find_release, publish_targets
from mergegate.tasks.publish.targets import registry as target_registry

PROJECT = Path(__file__).resolve().parents[2]
PROFILE: dict[str, object] = {"name": "demo", "recipe": "x.yaml", "perplexity": {"documents": "held-out.jsonl"}}
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


def target_of(profile: dict[str, object]) -> PublishTarget:
    target = parse_profile(profile, "p").publish
    assert target is not None
    return target


def test_a_profile_can_name_it_and_its_settings_are_as_strict_as_ours(shelf: type[PublishTarget]) -> None:
    assert target_of({**PROFILE, "publish": SHELF}) == shelf.model_validate(SHELF)
    with pytest.raises(InvalidInput) as misspelt:
        parse_profile({**PROFILE, "publish": {**SHELF, "plaec": "x"}}, "p")
    assert str(misspelt.value) == "p: publish.plaec: unknown key 'plaec'\n  remedy:   did you mean 'place'?"
    with pytest.raises(InvalidInput, match=r"p: publish\.place: is missing"):
        parse_profile({**PROFILE, "publish": {"to": "shelf"}}, "p")
    with pytest.raises(InvalidInput, match=r"'directory', .*'shelf'"):
        parse_profile({**PROFILE, "publish": {"to": "shlef"}}, "p")


def test_a_schema_built_after_installation_includes_the_target(shelf: type[PublishTarget]) -> None:
    class Settings(BaseModel):
        publish: Target

    read = Settings.model_validate({"publish": SHELF})
    assert type(read.publish) is shelf
    assert read.model_dump(mode="json") == {"publish": shelf.model_validate(SHELF).model_dump(mode="json")}


def test_the_licenses_of_a_public_one_must_have_been_checked_for_that(shelf: type[PublishTarget]) -> None:
    private = {**PROFILE, "checks": {"license": {"visibility": "private"}}}
    with pytest.raises(InvalidInput, match=r"checks\.license\.visibility"):
        parse_profile({**private, "publish": {**SHELF, "open_to_all": True}}, "p")
    parse_profile({**private, "publish": SHELF}, "p")


def test_a_problem_with_the_target_is_found_before_the_merge(tmp_path: Path, shelf: type[PublishTarget]) -> None:
    target = target_of({**PROFILE, "publish": SHELF})
    check_target(target, tmp_path)
    signed = target_of({**PROFILE, "publish": {**SHELF, "sign_key": "release.key"}})
    with pytest.raises(InvalidInput, match=r"release\.key: cannot be read: No such file"):
        check_target(signed, tmp_path)
    (tmp_path / "library").write_text("")
    with pytest.raises(Refused, match=r"publish\.place"):
        check_target(target, tmp_path)


def test_a_release_flows_through_it(
    tmp_path: Path, home: Path, prefect_api: None, monkeypatch: pytest.MonkeyPatch, shelf: type[PublishTarget]
) -> None:
    target = target_of({**PROFILE, "publish": SHELF})
    one, two = publishable(tmp_path / "one"), publishable(tmp_path / "two", weights=b"others")
    hashes = HashMemo(tmp_path / "hashes.sqlite")
    merge = Model(name="merge", digest="d" * 64, directory=one.merged.directory)
    assert load_released_model(target, tmp_path, merge, hashes) is None

    released = one.publish(target, tmp_path)
    assert (released.name, released.label, released.new) == ("demo", "shelf:library", True)
    again = one.publish(target, tmp_path)
    assert (again.version, again.new) == (released.version, False)

    champion = load_released_model(target, tmp_path, merge, hashes)
    assert champion is not None
    assert (champion.digest, champion.head) == (merge.digest, released.version)
    assert (champion.directory / "model.safetensors").read_bytes() == b"weights"
    assert "mergegate verify shelf:library" in (champion.directory / "README.md").read_text()

    later = two.publish(target, tmp_path, expected_head=champion.head)
    assert later.new
    with pytest.raises(Refused, match=f"{later.version} is current"):
        publishable(tmp_path / "three", weights=b"late").publish(target, tmp_path, expected_head=champion.head)

    monkeypatch.chdir(tmp_path)
    for name, version in (("shelf:library", later.version), (f"shelf:library@{released.version}", released.version)):
        verified = check_release(find_release(name), recompute=True)
        assert (verified.version, verified.signed) == (version, "none")
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
