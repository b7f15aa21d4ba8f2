"""`mergegate verify` and `reproduce` on the released demo: no change goes unnoticed, and it can be made again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from demo_project import PROFILES, Printed, Project

from merge_core.errors import InvalidInput, Refused
from tasks.publish.content import PROVENANCE, RECIPE, SIGNATURE, SUMS
from tasks.publish.signature import sign
from tasks.publish.standing import InDirectory
from tasks.publish.sums import sha256_of, sums_text
from tasks.publish.verify import verify

Released = tuple[Project, Printed]


@pytest.fixture
def release(released: Released, tmp_path: Path) -> Path:
    """A copy of the demo release, under the name of its version."""
    project, result = released
    assert result.exit_code == 0, result.output
    version = project.latest.resolve()
    return Path(shutil.copytree(version, tmp_path / version.name))


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key."""
    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "release.key", tmp_path / "release.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def files_of(release: Path) -> list[Path]:
    return [path for path in sorted(release.rglob("*")) if path.is_file()]


def write_sums(release: Path) -> None:
    """SHA256SUMS that agrees with the files, as a forger would make it."""
    hashes = {
        str(path.relative_to(release)): sha256_of(path.read_bytes()) for path in files_of(release) if path.name != SUMS
    }
    (release / SUMS).write_text(sums_text(hashes))


def edit_provenance(release: Path) -> None:
    """Let the provenance say that another seed was used."""
    statement = json.loads((release / PROVENANCE).read_text())
    statement["predicate"]["buildDefinition"]["externalParameters"]["seed"] = 7
    (release / PROVENANCE).write_text(json.dumps(statement, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def sign_it(release: Path, private: Path) -> None:
    (release / SIGNATURE).write_text(sign((release / PROVENANCE).read_bytes(), private))
    write_sums(release)


def test_the_released_demo_is_what_it_says(released: Released) -> None:
    project, _ = released
    result = project.mergegate("verify", "releases/demo/latest")
    assert result.exit_code == 0, result.output
    assert f"its version {project.latest.resolve().name} is its content" in result.output
    assert "it is not signed" in result.output
    told = json.loads(project.mergegate("verify", "releases/demo/latest", "--json").stdout)
    assert (told["status"], told["signed"]) == ("verified", "none")


def test_plain_sha256sum_can_check_it_too(release: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=release, check=True)
    assert len((release / SUMS).read_text().splitlines()) == len(files_of(release)) - 1


def test_a_byte_flipped_in_any_file_is_found(release: Path) -> None:
    assert verify(InDirectory(release)).files == len(files_of(release))
    elsewhere = release.rename(release.with_name("downloaded"))  # so that no version name helps
    for path in files_of(elsewhere):
        original = path.read_bytes()
        for place in {0, len(original) // 2, len(original) - 1}:
            damaged = bytearray(original)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(Refused):
                verify(InDirectory(elsewhere))
        path.write_bytes(original)
    verify(InDirectory(elsewhere))


def test_a_missing_file_and_an_added_one_are_named(release: Path) -> None:
    (release / "tokenizer.json").unlink()
    (release / "extra.py").write_text("print('hello')")
    with pytest.raises(Refused) as refusal:
        verify(InDirectory(release))
    assert "tokenizer.json: missing, though SHA256SUMS lists it" in str(refusal.value)
    assert "extra.py: not listed by provenance.json" in str(refusal.value)


def test_what_a_download_leaves_beside_it_is_no_part_of_it(release: Path) -> None:
    (release / ".cache" / "huggingface").mkdir(parents=True)
    (release / ".cache" / "huggingface" / "x.lock").touch()
    (release / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    assert verify(InDirectory(release)).version == release.name


def test_an_edited_provenance_is_refused(released: Released, release: Path) -> None:
    edit_provenance(release)
    result = released[0].mergegate("verify", str(release))
    assert result.exit_code == 3
    assert re.search(r"provenance\.json: sha256 is \w+…, SHA256SUMS says", result.output)


def test_an_edited_provenance_with_sums_made_to_agree_is_refused_by_the_version(release: Path) -> None:
    edit_provenance(release)
    write_sums(release)
    with pytest.raises(Refused, match=f"its version is {release.name}, its content is"):
        verify(InDirectory(release))


def test_a_recipe_that_is_not_that_of_the_provenance_is_refused(release: Path) -> None:
    elsewhere = release.rename(release.with_name("forged"))
    recipe = elsewhere / RECIPE
    recipe.write_text(recipe.read_text().replace("density: 0.", "density: 0.1"))
    statement = json.loads((elsewhere / PROVENANCE).read_text())
    for subject in statement["subject"]:
        if subject["name"] == RECIPE:
            subject["digest"]["sha256"] = sha256_of(recipe.read_bytes())
    (elsewhere / PROVENANCE).write_text(json.dumps(statement))
    write_sums(elsewhere)
    with pytest.raises(Refused) as refusal:
        verify(InDirectory(elsewhere))
    assert "provenance.json: its recipe is not that of recipe.yaml" in str(refusal.value)
    assert "README.md: its recipe is not that of recipe.yaml" in str(refusal.value)


def test_a_signature_holds_what_nothing_else_can(released: Released, release: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    elsewhere = release.rename(release.with_name("signed"))
    sign_it(elsewhere, private)
    result = released[0].mergegate("verify", str(elsewhere), "--key", str(public))
    assert result.exit_code == 0, result.output
    assert "the signature is valid" in result.output
    assert verify(InDirectory(elsewhere)).signed == "not checked"

    edit_provenance(elsewhere)
    write_sums(elsewhere)
    with pytest.raises(Refused, match="signs something else"):
        verify(InDirectory(elsewhere))
    forger = Ed25519PrivateKey.generate()
    private.write_bytes(
        forger.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    sign_it(elsewhere, private)
    with pytest.raises(Refused, match=r"not signed with the key release\.pub"):
        verify(InDirectory(elsewhere), public)
    (elsewhere / SIGNATURE).unlink()
    write_sums(elsewhere)
    with pytest.raises(Refused, match="it is not signed"):
        verify(InDirectory(elsewhere), public)


def test_what_is_no_key_is_said(release: Path) -> None:
    with pytest.raises(InvalidInput, match="openssl genpkey"):
        sign(b"", release / "README.md")


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
    assert "all equal to the byte" in result.output


def test_parents_are_found_beside_the_same_recipe_in_the_project(released: Released) -> None:
    project, _ = released
    shutil.copytree(PROFILES / "demo" / "recipes", project.root / "sources" / "recipes", dirs_exist_ok=True)
    (project.root / "sources" / "models").symlink_to(PROFILES / "demo" / "models")
    told = json.loads(project.mergegate("reproduce", "releases/demo/latest", "--json").stdout)
    assert told["status"] == "reproduced"
    assert "model.safetensors" in told["files"]


def test_a_parent_that_is_another_now_is_not_merged(released: Released, tmp_path: Path) -> None:
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
    forged = release.rename(release.with_name("forged"))
    weights = bytearray((forged / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (forged / "model.safetensors").write_bytes(weights)
    statement = json.loads((forged / PROVENANCE).read_text())
    for subject in statement["subject"]:
        subject["digest"]["sha256"] = sha256_of((forged / subject["name"]).read_bytes())
    (forged / PROVENANCE).write_text(json.dumps(statement))
    write_sums(forged)
    project, _ = released
    result = project.mergegate("reproduce", str(forged), "--parents", str(PROFILES / "demo" / "recipes"))
    assert result.exit_code == 3
    assert "model.safetensors" in result.output
    assert "files are others" in result.output


def test_the_bill_of_materials_lists_every_file_and_every_parent(release: Path) -> None:
    bom = json.loads((release / "bom.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    model = bom["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    names = [ancestor["name"] for ancestor in model["pedigree"]["ancestors"]]
    statement = json.loads((release / PROVENANCE).read_text())
    assert names == [d["name"] for d in statement["predicate"]["buildDefinition"]["resolvedDependencies"]]
    hashes = {part["name"]: part["hashes"][0]["content"] for part in bom["components"]}
    assert hashes == {
        path.relative_to(release).as_posix(): sha256_of(path.read_bytes())
        for path in files_of(release)
        if path.name not in {"bom.json", PROVENANCE, SUMS}
    }
    references = [bom["metadata"]["component"]["bom-ref"], *(part["bom-ref"] for part in bom["components"])]
    references += [ancestor["bom-ref"] for ancestor in model["pedigree"]["ancestors"]]
    assert len(references) == len(set(references))
