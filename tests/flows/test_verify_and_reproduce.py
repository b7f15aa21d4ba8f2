"""`mergegate verify` and `reproduce` on the released demo: they detect every change and rebuild the release."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from demo_project import PROFILES, Printed, Project
from signing_keys import write_keys

from mergegate.flows.release import release as release_flow
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.publish.content import (
    BOM,
    CARD,
    PROVENANCE,
    RECIPE,
    SIGNATURE,
    SPDX,
    SUMS,
    checksums_text,
    sha256_of,
)
from mergegate.tasks.publish.releases.verify import check_release
from mergegate.tasks.publish.signature import sign
from mergegate.tasks.publish.targets.directory import DirectoryRelease
from mergegate.tasks.stage.progress import progress_watcher

Released = tuple[Project, Printed]


@pytest.fixture
def release(released: Released, tmp_path: Path) -> Path:
    """Return a copy of the demo release, in a directory named after its version."""
    project, result = released
    assert result.exit_code == 0, result.output
    version = project.latest.resolve()
    return Path(shutil.copytree(version, tmp_path / version.name))


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Return the paths of a private and a public key."""
    return write_keys(tmp_path)


def files_of(release: Path) -> list[Path]:
    return [path for path in sorted(release.rglob("*")) if path.is_file()]


def hashes_of(release: Path, *without: str) -> dict[str, str]:
    return {
        path.relative_to(release).as_posix(): sha256_of(path.read_bytes())
        for path in files_of(release)
        if path.name not in without
    }


def write_sums(release: Path) -> None:
    """Write a SHA256SUMS that matches the files, as a forger would."""
    (release / SUMS).write_text(checksums_text(hashes_of(release, SUMS, SIGNATURE)))


def forge(release: Path, *changed: str) -> Path:
    """Update provenance, bill of materials and SHA256SUMS to match the changed files.

    The release moves to another name, so that its version cannot give the change away.
    """
    bom = json.loads((release / BOM).read_text())
    files = [part for part in bom["components"] if "hashes" in part]
    if SPDX not in changed and (release / SPDX).exists():
        spdx = json.loads((release / SPDX).read_text())
        spdx["@graph"] = [element for element in spdx["@graph"] if element["type"] != "software_File"]
        for part in files:
            if part["name"] != SPDX:
                digest = {"hashValue": sha256_of((release / part["name"]).read_bytes())}
                spdx["@graph"].append({"type": "software_File", "name": part["name"], "verifiedUsing": [digest]})
        (release / SPDX).write_text(json.dumps(spdx))
    for part in files:
        part["hashes"][0]["content"] = sha256_of((release / part["name"]).read_bytes())
    if BOM not in changed:
        (release / BOM).write_text(json.dumps(bom))
    statement = json.loads((release / PROVENANCE).read_text())
    for subject in statement["subject"]:
        subject["digest"]["sha256"] = sha256_of((release / subject["name"]).read_bytes())
    (release / PROVENANCE).write_text(json.dumps(statement))
    write_sums(release)
    return release.rename(release.with_name("forged"))


def edit_provenance(release: Path) -> None:
    """Change the seed in the provenance."""
    statement = json.loads((release / PROVENANCE).read_text())
    statement["predicate"]["buildDefinition"]["internalParameters"]["seeds"]["merge"] = 7
    (release / PROVENANCE).write_text(json.dumps(statement, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def sign_it(release: Path, private: Path) -> None:
    write_sums(release)
    (release / SIGNATURE).write_text(sign("demo", hashes_of(release, SIGNATURE), private))


def refusal_of(release: Path, key: Path | None = None) -> str:
    with pytest.raises(Refused) as refusal:
        check_release(DirectoryRelease(release), key)
    return str(refusal.value)


def test_the_released_demo_is_what_it_says(released: Released) -> None:
    project, _ = released
    result = project.mergegate("verify", "releases/demo/latest")
    assert result.exit_code == 0, result.output
    assert f"its content matches its version {project.latest.resolve().name}" in result.output
    assert "it is not signed" in result.output
    told = json.loads(project.mergegate("verify", "releases/demo/latest", "--json").stdout)
    assert (told["status"], told["signed"]) == ("verified", "none")


def test_plain_sha256sum_can_check_it_too(release: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=release, check=True)
    assert len((release / SUMS).read_text().splitlines()) == len(files_of(release)) - 1


@pytest.mark.story
@pytest.mark.parametrize("signed", [False, True])
def test_a_byte_flipped_in_any_file_is_found(release: Path, keys: tuple[Path, Path], signed: bool) -> None:
    assert check_release(DirectoryRelease(release)).files == len(files_of(release))
    elsewhere = release.rename(release.with_name("downloaded"))  # The version cannot give it away.
    if signed:
        sign_it(elsewhere, keys[0])
    key = keys[1] if signed else None
    assert {"LICENSE", CARD, BOM, RECIPE, SUMS, "report.html"} <= {path.name for path in files_of(elsewhere)}
    for path in files_of(elsewhere):
        original = path.read_bytes()
        # The last byte of a text may be any whitespace, which has no meaning; in a signature it is not compared.
        last = len(original) - (2 if path.name == SIGNATURE else 1)
        for place in {0, len(original) // 3, len(original) // 2, last}:
            damaged = bytearray(original)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(Refused):
                check_release(DirectoryRelease(elsewhere), key)
        path.write_bytes(original)
    check_release(DirectoryRelease(elsewhere), key)


def test_a_missing_file_and_an_added_one_are_named(release: Path) -> None:
    (release / "tokenizer.json").unlink()
    (release / "extra.py").write_text("print('hello')")
    with pytest.raises(Refused) as refusal:
        check_release(DirectoryRelease(release))
    assert "tokenizer.json: missing, though SHA256SUMS lists it" in str(refusal.value)
    assert "extra.py: not listed by provenance.json" in str(refusal.value)


def test_what_a_download_leaves_beside_it_is_no_part_of_it(release: Path) -> None:
    (release / ".cache" / "huggingface").mkdir(parents=True)
    (release / ".cache" / "huggingface" / "x.lock").touch()
    (release / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    assert check_release(DirectoryRelease(release)).version == release.name


def test_an_edited_provenance_is_refused(released: Released, release: Path) -> None:
    edit_provenance(release)
    result = released[0].mergegate("verify", str(release))
    assert result.exit_code == 3
    assert re.search(r"provenance\.json: sha256 is \w+…, SHA256SUMS specifies", result.output)


def test_an_edited_provenance_with_sums_made_to_agree_is_refused_by_the_version(release: Path) -> None:
    edit_provenance(release)
    write_sums(release)
    with pytest.raises(Refused, match=f"its version is {release.name}, its content is"):
        check_release(DirectoryRelease(release))


def test_a_recipe_that_is_not_that_of_the_provenance_is_refused(release: Path) -> None:
    recipe = release / RECIPE
    recipe.write_text(recipe.read_text().replace("density: 0.", "density: 0.1"))
    found = refusal_of(forge(release))
    assert "provenance.json: its recipe is not that of recipe.yaml" in found
    assert "README.md: its recipe is not that of recipe.yaml" in found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("license", "mit"),
        ("base_model", ["acme/another"]),
        ("tags", ["merge"]),
        ("model-index", []),
        ("pipeline_tag", "x"),
    ],
)
def test_metadata_of_the_card_that_the_provenance_does_not_know_is_refused(
    release: Path, field: str, value: object
) -> None:
    _, front, page = (release / CARD).read_text().split("---\n", 2)
    metadata = {**yaml.safe_load(front), field: value}
    (release / CARD).write_text(f"---\n{yaml.safe_dump(metadata)}---\n{page}")
    assert f"README.md: its metadata is not that of provenance.json ({field})" in refusal_of(forge(release))


def test_a_card_and_a_provenance_that_were_edited_alike_must_agree_with_the_parents_and_the_license(
    release: Path,
) -> None:
    _, front, page = (release / CARD).read_text().split("---\n", 2)
    metadata = {**yaml.safe_load(front), "base_model": ["acme/another"], "license": "mit"}
    (release / CARD).write_text(f"---\n{yaml.safe_dump(metadata)}---\n{page}")
    statement = json.loads((release / PROVENANCE).read_text())
    statement["predicate"]["mergegate_card"] = metadata
    (release / PROVENANCE).write_text(json.dumps(statement))
    found = refusal_of(forge(release))
    assert "README.md: its base_model differs from the parents in provenance.json" in found
    assert "README.md: its license is not that of provenance.json" in found


def test_a_bill_of_materials_that_the_provenance_does_not_know_is_refused(release: Path) -> None:
    bom = json.loads((release / BOM).read_text())
    bom["metadata"]["component"]["pedigree"]["ancestors"][0]["version"] = "0" * 64
    bom["components"].pop()
    (release / BOM).write_text(json.dumps(bom))
    found = refusal_of(forge(release, BOM))
    assert "bom.json: its parents are not those of provenance.json" in found
    assert "not listed by bom.json" in found


def test_a_second_bill_of_materials_that_the_provenance_does_not_know_is_refused(release: Path) -> None:
    spdx = json.loads((release / SPDX).read_text())
    parents = [item["from"] for item in spdx["@graph"] if item.get("relationshipType") == "ancestorOf"]
    for element in spdx["@graph"]:
        if element.get("spdxId") == parents[0]:
            element["software_packageVersion"] = "0" * 64
        if element["type"] == "software_File" and element["name"] == CARD:
            element["verifiedUsing"][0]["hashValue"] = "0" * 64
    (release / SPDX).write_text(json.dumps(spdx))
    found = refusal_of(forge(release, SPDX))
    assert "bom.spdx.json: its parents are not those of provenance.json" in found
    assert "README.md: sha256 is" in found
    assert "bom.spdx.json specifies 000000000000…" in found


def test_a_release_of_a_version_without_a_second_bill_of_materials_is_verified(
    release: Path, released: Released
) -> None:
    (release / SPDX).unlink()
    for name, key in ((BOM, "components"), (PROVENANCE, "subject")):
        content = json.loads((release / name).read_text())
        content[key] = [item for item in content[key] if item["name"] != SPDX]
        content.get("metadata", {}).pop("properties", None)
        (release / name).write_text(json.dumps(content))
    result = released[0].mergegate("verify", str(forge(release)))
    assert result.exit_code == 0, result.output
    assert "missing facts" not in result.output


def test_a_signature_detects_changes_that_nothing_else_detects(
    released: Released, release: Path, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    elsewhere = release.rename(release.with_name("signed"))
    sign_it(elsewhere, private)
    result = released[0].mergegate("verify", str(elsewhere), "--key", str(public))
    assert result.exit_code == 0, result.output
    assert "the signature is valid" in result.output
    assert check_release(DirectoryRelease(elsewhere)).signed == "not checked"

    edit_provenance(elsewhere)
    write_sums(elsewhere)
    assert "provenance.json: sha256 is" in refusal_of(elsewhere)
    stranger, _ = write_keys(elsewhere.parent, name="stranger")
    sign_it(elsewhere, stranger)
    assert "model.sig: not signed with the key release.pub" in refusal_of(elsewhere, public)
    (elsewhere / SIGNATURE).unlink()
    assert "the release is not signed" in refusal_of(elsewhere, public)


def test_openssf_model_signing_accepts_a_signed_release_and_we_accept_what_it_signed(
    released: Released, release: Path, keys: tuple[Path, Path]
) -> None:
    from model_signing import hashing, signing, verifying

    private, public = keys
    elsewhere = release.rename(release.with_name("signed"))
    sign_it(elsewhere, private)
    (elsewhere / ".cache").mkdir()  # Downloads leave such a directory.
    (elsewhere / ".cache" / "x.lock").touch()
    verifying.Config().use_elliptic_key_verifier(public_key=public).verify(elsewhere, elsewhere / SIGNATURE)

    (elsewhere / SIGNATURE).unlink()
    without = hashing.Config().set_ignored_paths(paths=[SIGNATURE, ".cache"])
    signer = signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(without)
    signer.sign(elsewhere, elsewhere / SIGNATURE)
    result = released[0].mergegate("verify", str(elsewhere), "--key", str(public))
    assert result.exit_code == 0, result.output

    weights = bytearray((elsewhere / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (elsewhere / "model.safetensors").write_bytes(weights)
    assert "model.safetensors: sha256 is" in refusal_of(elsewhere, public)
    with pytest.raises(ValueError, match="Hash mismatch"):
        verifying.Config().use_elliptic_key_verifier(public_key=public).verify(elsewhere, elsewhere / SIGNATURE)


@pytest.mark.story
def test_a_key_in_the_profile_signs_the_release_and_signing_again_is_nothing_new(
    released: Released, keys: tuple[Path, Path]
) -> None:
    project, _ = released
    shutil.copy(keys[0], project.root / "profiles" / "release.key")
    profile = project.edit("demo.yaml", "path: ../releases/demo\n", "path: ../releases/demo\n  sign_key: release.key\n")
    first = project.mergegate("run", profile, "--json")
    again = project.mergegate("run", profile, "--json")
    assert [json.loads(run.stdout)["status"] for run in (first, again)] == ["released", "nothing new"]
    place = json.loads(first.stdout)["location"]
    told = project.mergegate("verify", place, "--key", str(keys[1]), "--json")
    assert json.loads(told.stdout)["signed"] == "valid"


@pytest.mark.story
def test_whoever_watches_sees_the_bytes_of_the_publication(released: Released, monkeypatch: pytest.MonkeyPatch) -> None:
    project, _ = released
    profile = project.edit("demo.yaml", "path: ../releases/demo\n", "path: ../releases/demo-watched\n")
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("MERGEGATE_HOME", str(project.home))
    seen = Watched()
    with progress_watcher(seen):
        outcome = release_flow(Path(profile), return_state=True).result()
    place = Path(outcome.location)
    total = sum(path.stat().st_size for path in files_of(place))
    assert seen.publishing[-1] == (total, total, "B")
    assert [done for done, *_ in seen.publishing] == sorted(done for done, *_ in seen.publishing)


class Watched:
    """Progress watcher that records the events of a publication."""

    def __init__(self) -> None:
        self.publishing: list[tuple[int, int, str]] = []

    def on_message(self, text: str) -> None: ...
    def on_start(self, stage: str, subject: str) -> None: ...
    def on_end(self, stage: str, subject: str, ending: str, seconds: float, summary: str) -> None: ...
    def on_progress(self, stage: str, subject: str, completed: int, total: int, unit: str) -> None:
        if stage == "publish":
            self.publishing.append((completed, total, unit))


def test_what_is_no_key_is_said(release: Path) -> None:
    with pytest.raises(InvalidInput, match="openssl ecparam"):
        sign("demo", {}, release / "README.md")
    with pytest.raises(InvalidInput, match="openssl ecparam"):
        check_release(DirectoryRelease(release), release / "README.md")


def test_what_is_no_release_is_said(project: Project) -> None:
    result = project.mergegate("verify", "releases/nothing/here")
    assert result.exit_code == 2
    assert "no such directory" in result.output
    result = project.mergegate("verify", "profiles")
    assert result.exit_code == 3
    assert "the provenance that every release of mergegate has" in result.output


def test_the_demo_is_reproduced_to_the_byte(released: Released) -> None:
    project, _ = released
    result = project.mergegate("reproduce", "releases/demo/latest", "--parents", str(PROFILES / "demo" / "recipes"))
    assert result.exit_code == 0, result.output
    assert "= model.safetensors" in result.output
    assert re.search(r"rebuilt in .* on (cpu|cuda); \d+ files, all identical", result.output)


@pytest.mark.story
def test_parents_are_found_beside_the_same_recipe_in_the_project(released: Released) -> None:
    project, _ = released
    shutil.copytree(PROFILES / "demo" / "recipes", project.root / "sources" / "recipes", dirs_exist_ok=True)
    (project.root / "sources" / "models").symlink_to(PROFILES / "demo" / "models")
    told = json.loads(project.mergegate("reproduce", "releases/demo/latest", "--json").stdout)
    assert told["status"] == "reproduced"
    assert "model.safetensors" in told["files"]


def test_a_parent_that_changed_is_not_merged(released: Released, tmp_path: Path) -> None:
    project, _ = released
    shutil.copytree(PROFILES / "demo" / "models", tmp_path / "models")
    (tmp_path / "recipes").mkdir()
    config = tmp_path / "models" / "base" / "config.json"
    config.write_text(config.read_text() + "\n")
    result = project.mergegate("reproduce", "releases/demo/latest", "--parents", str(tmp_path / "recipes"))
    assert result.exit_code == 2
    assert "the checkpoint" in result.output
    assert "that was merged" in result.output


def test_weights_that_the_recipe_does_not_give_are_refused(release: Path, released: Released) -> None:
    weights = bytearray((release / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (release / "model.safetensors").write_bytes(weights)
    project, _ = released
    result = project.mergegate("reproduce", str(forge(release)), "--parents", str(PROFILES / "demo" / "recipes"))
    assert result.exit_code == 3
    assert "model.safetensors" in result.output
    assert "rebuilt files differ" in result.output


def test_different_weights_on_another_device_name_the_device(release: Path, released: Released) -> None:
    weights = bytearray((release / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (release / "model.safetensors").write_bytes(weights)
    statement = json.loads((release / PROVENANCE).read_text())
    statement["predicate"]["buildDefinition"]["internalParameters"]["device"] = "cuda"
    (release / PROVENANCE).write_text(json.dumps(statement))
    elsewhere = str(forge(release))
    result = released[0].mergegate(
        "reproduce", elsewhere, "--parents", str(PROFILES / "demo" / "recipes"), "--device", "cpu"
    )
    assert result.exit_code == 3
    assert "the release was built on cuda and rebuilt on cpu; use --device cuda" in result.output


def test_a_provenance_of_another_version_is_refused_in_words(release: Path, released: Released) -> None:
    statement = json.loads((release / PROVENANCE).read_text())
    del statement["predicate"]["buildDefinition"]["internalParameters"]["seeds"]
    (release / PROVENANCE).write_text(json.dumps(statement))
    result = released[0].mergegate("reproduce", str(forge(release)))
    assert result.exit_code == 3
    assert "provenance.json: internalParameters.seeds" in result.output


def test_the_bill_of_materials_lists_every_file_and_every_parent(release: Path) -> None:
    bom = json.loads((release / "bom.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    model = bom["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    names = [ancestor["name"] for ancestor in model["pedigree"]["ancestors"]]
    statement = json.loads((release / PROVENANCE).read_text())
    assert names == [d["name"] for d in statement["predicate"]["buildDefinition"]["resolvedDependencies"]]
    files = [part for part in bom["components"] if part["type"] == "file"]
    hashes = {part["name"]: part["hashes"][0]["content"] for part in files}
    assert hashes == {
        path.relative_to(release).as_posix(): sha256_of(path.read_bytes())
        for path in files_of(release)
        if path.name not in {"bom.json", PROVENANCE, SUMS}
    }
    references = [bom["metadata"]["component"]["bom-ref"], *(part["bom-ref"] for part in bom["components"])]
    references += [ancestor["bom-ref"] for ancestor in model["pedigree"]["ancestors"]]
    assert len(references) == len(set(references))
