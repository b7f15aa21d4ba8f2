"""`mergegate verify` and `reproduce` on the released demo: they detect every change and rebuild the release."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from demo_project import PROFILES, Printed, Project, expect
from forged_evidence import (
    FORGERIES,
    Columns,
    Evidence,
    edit,
    edit_card,
    edit_provenance,
    files_of,
    flip_one_outcome,
    forge,
    leaves,
    numbers,
    record,
    refusal_of,
    relist,
    remove,
    require_digest_or_verdict_notices,
    require_every_flip_is_found,
    sign_release,
    write_sums,
)
from other_words import read_with_other_words
from samples import sampled_rows
from signing_keys import write_keys
from tampering import flip

import mergegate
from mergegate.flows.release import release as release_flow
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage.progress import progress_watcher
from mergegate.tasks.quality.gate.verdict_record import EVIDENCE_RECORD, OUTCOMES
from mergegate.tasks.release.publish.content import (
    BOM,
    CARD,
    COMPLIANCE,
    FACTS,
    PROVENANCE,
    RECIPE,
    REPORT,
    SIGNATURE,
    SUMS,
)
from mergegate.tasks.release.publish.releases.verify import check_release
from mergegate.tasks.release.publish.signing import sign
from mergegate.tasks.release.publish.targets.directory import DirectoryRelease

Released = tuple[Project, Printed]
RECIPES = str(PROFILES / "demo" / "recipes")
WEIGHTS = "model.safetensors"


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


def change_the_seed(release: Path) -> None:
    statement = json.loads((release / PROVENANCE).read_text())
    statement["predicate"]["buildDefinition"]["internalParameters"]["seeds"]["merge"] = 7
    (release / PROVENANCE).write_text(json.dumps(statement, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


# Verification of files, statements and signatures.


def test_the_released_demo_is_what_it_says(demo: Project, release: Path) -> None:
    result = demo.mergegate("verify", "releases/demo/latest")
    expect(result, 0, f"its content matches its version {demo.latest.resolve().name}", "it is not signed")
    told = json.loads(demo.mergegate("verify", "releases/demo/latest", "--json").stdout)
    assert (told["status"], told["signed"], told["message"][-20:]) == ("verified", "none", "consistent; unsigned")
    assert 0 < len(told["facts_at_risk"]) <= 10
    assert all(f"* {subject}" in result.output for subject in told["facts_at_risk"])
    # Plain sha256sum can check it, too.
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=release, check=True)
    assert len((release / SUMS).read_text().splitlines()) == len(files_of(release)) - 1


@pytest.mark.story
@pytest.mark.parametrize("signed", [False, True])
def test_a_byte_flipped_in_any_file_is_found(release: Path, keys: tuple[Path, Path], signed: bool) -> None:
    assert check_release(DirectoryRelease(release)).files == len(files_of(release))
    elsewhere = release.rename(release.with_name("downloaded"))  # The version cannot give it away.
    if signed:
        sign_release(elsewhere, keys[0])
    assert {"LICENSE", CARD, BOM, RECIPE, SUMS, "report.html"} <= {path.name for path in files_of(elsewhere)}
    require_every_flip_is_found(elsewhere, keys[1] if signed else None)


def test_a_missing_file_and_an_added_one_are_named(release: Path) -> None:
    (release / "tokenizer.json").unlink()
    (release / "extra.py").write_text("print('hello')")
    found = refusal_of(release)
    assert "tokenizer.json: missing, though SHA256SUMS lists it" in found
    assert "extra.py: not listed by provenance.json" in found


def test_what_a_download_leaves_beside_it_is_no_part_of_it(release: Path) -> None:
    (release / ".cache" / "huggingface").mkdir(parents=True)
    (release / ".cache" / "huggingface" / "x.lock").touch()
    (release / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    assert check_release(DirectoryRelease(release)).version == release.name


def test_an_edited_provenance_is_refused_by_its_digest_or_by_the_version(demo: Project, release: Path) -> None:
    change_the_seed(release)
    result = expect(demo.mergegate("verify", str(release)), 3)
    assert re.search(r"provenance\.json: sha256 is \w+…, SHA256SUMS specifies", result.output)
    write_sums(release)
    assert f"its version is {release.name}, its content is" in refusal_of(release)


def edit_recipe(release: Path) -> None:
    (release / RECIPE).write_text((release / RECIPE).read_text().replace("density: 0.", "density: 0.1"))


def edit_card_and_provenance(release: Path) -> None:
    metadata = edit_card(release, base_model=["acme/another"], license="mit")
    edit_provenance(release, "mergegate_card", metadata)


def edit_bom(release: Path) -> None:
    edit(release / BOM, "metadata.component.pedigree.ancestors.0.version", "0" * 64)
    edit(release / BOM, "components", lambda components: components[:-1])


UNKNOWN = "README.md: its metadata is not that of provenance.json "


@pytest.mark.parametrize(
    ("edit", "forged", "messages"),
    [
        (edit_recipe, (), [f"{file}: its recipe is not that of recipe.yaml" for file in (PROVENANCE, CARD)]),
        (lambda release: edit_card(release, license="mit"), (), [f"{UNKNOWN}(license)"]),
        (lambda release: edit_card(release, base_model=["acme/another"]), (), [f"{UNKNOWN}(base_model)"]),
        (lambda release: edit_card(release, tags=["merge"]), (), [f"{UNKNOWN}(tags)"]),
        (lambda release: edit_card(release, **{"model-index": []}), (), [f"{UNKNOWN}(model-index)"]),
        (lambda release: edit_card(release, pipeline_tag="x"), (), [f"{UNKNOWN}(pipeline_tag)"]),
        (
            edit_card_and_provenance,
            (),
            [
                "README.md: its base_model differs from the parents in provenance.json",
                "README.md: its license is not that of provenance.json",
            ],
        ),
        (edit_bom, (BOM,), ["bom.json: its parents are not those of provenance.json", "not listed by bom.json"]),
    ],
)
def test_files_that_contradict_each_other_are_refused_although_all_digests_agree(
    release: Path, edit: Callable[[Path], object], forged: tuple[str, ...], messages: list[str]
) -> None:
    edit(release)
    found = refusal_of(forge(release, *forged))
    assert [message for message in messages if message not in found] == []


def twice(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**items[-1], "digest": {"sha256": "0" * 64}}, *items]


def repeat_a_key(file: str, key: str) -> Callable[[Path], object]:
    return lambda release: (release / file).write_text(
        (release / file).read_text().replace(f'"{key}": ', f'"{key}": 0,\n "{key}": ', 1)
    )


CONTRADICTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a key of the provenance": (repeat_a_key(PROVENANCE, "predicate"), "duplicate key 'predicate'"),
    "a key of a bill": (repeat_a_key(BOM, "components"), "bom.json: not JSON: duplicate key 'components'"),
    "a key of the facts": (repeat_a_key(FACTS, "files"), "evidence/facts.json: not JSON: duplicate key 'files'"),
    "a key of the evidence": (repeat_a_key(EVIDENCE_RECORD, "verdict"), "not JSON: duplicate key 'verdict'"),
    "a subject": (lambda release: edit(release / PROVENANCE, "subject", twice), "provenance.json: duplicate entry"),
    "a parent": (
        lambda release: edit_provenance(release, "buildDefinition.resolvedDependencies", twice),
        "provenance.json: duplicate entry '../models/",
    ),
    "a component": (lambda release: edit(release / BOM, "components", twice), "bom.json: duplicate entry"),
    "a predicate type": (
        lambda release: edit(release / PROVENANCE, "predicateType", "https://example.org/x"),
        "not an in-toto statement with SLSA provenance",
    ),
}


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_lists_that_contradict_themselves_are_refused(
    release: Path, change: Callable[[Path], object], message: str
) -> None:
    elsewhere = Path(shutil.copytree(release, release.with_name("elsewhere")))
    change(elsewhere)
    assert message in refusal_of(relist(release, elsewhere), recompute=True)


def test_a_release_whose_bill_of_materials_lists_no_missing_facts_is_verified(release: Path, demo: Project) -> None:
    edit(release / BOM, "metadata.properties", ...)
    result = expect(demo.mergegate("verify", str(forge(release))), 0)
    assert "missing facts" not in result.output


def test_a_signature_detects_changes_that_nothing_else_detects(
    demo: Project, release: Path, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    elsewhere = release.rename(release.with_name("signed"))
    sign_release(elsewhere, private)
    result = demo.mergegate("verify", str(elsewhere), "--key", str(public))
    expect(result, 0, "all as published", "the signature is valid", "does not show whether a newer release exists")
    assert "only a valid signature" not in result.output
    assert check_release(DirectoryRelease(elsewhere)).state == "consistent; signature not checked"

    change_the_seed(elsewhere)
    write_sums(elsewhere)
    assert "provenance.json: sha256 is" in refusal_of(elsewhere)
    stranger, _ = write_keys(elsewhere.parent, name="stranger")
    sign_release(elsewhere, stranger)
    assert "model.sig: not signed with the key release.pub" in refusal_of(elsewhere, public)
    (elsewhere / SIGNATURE).unlink()
    assert "the release is not signed" in refusal_of(elsewhere, public)


@pytest.mark.story
def test_openssf_model_signing_accepts_a_signed_release_and_we_accept_what_it_signed(
    demo: Project, release: Path, keys: tuple[Path, Path]
) -> None:
    from model_signing import hashing, signing, verifying

    private, public = keys
    elsewhere = release.rename(release.with_name("signed"))
    sign_release(elsewhere, private)
    (elsewhere / ".cache").mkdir()  # Downloads leave such a directory.
    (elsewhere / ".cache" / "x.lock").touch()
    verifying.Config().use_elliptic_key_verifier(public_key=public).verify(elsewhere, elsewhere / SIGNATURE)

    (elsewhere / SIGNATURE).unlink()
    without = hashing.Config().set_ignored_paths(paths=[SIGNATURE, ".cache"])
    signer = signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(without)
    signer.sign(elsewhere, elsewhere / SIGNATURE)
    expect(demo.mergegate("verify", str(elsewhere), "--key", str(public)), 0)

    flip(elsewhere / WEIGHTS)
    assert "model.safetensors: sha256 is" in refusal_of(elsewhere, public)
    with pytest.raises(ValueError, match="Hash mismatch"):
        verifying.Config().use_elliptic_key_verifier(public_key=public).verify(elsewhere, elsewhere / SIGNATURE)


class Watched:
    """Progress watcher that records the events of a publication."""

    def __init__(self) -> None:
        self.publishing: list[tuple[int, int, str]] = []

    def on_progress(self, stage: str, subject: str, completed: int, total: int, unit: str) -> None:
        if stage == "publish":
            self.publishing.append((completed, total, unit))

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


@pytest.mark.story
def test_a_key_in_the_profile_signs_the_release_and_signing_again_is_nothing_new(
    demo: Project, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(keys[0], demo.root / "profiles" / "release.key")
    profile = demo.edit("demo.yaml", "path: ../releases/demo\n", "path: ../releases/demo\n  sign_key: release.key\n")
    monkeypatch.chdir(demo.root)
    monkeypatch.setenv("MERGEGATE_HOME", str(demo.home))
    seen = Watched()
    with progress_watcher(seen):  # type: ignore[arg-type]
        first = release_flow(Path(profile), return_state=True).result()
    again = json.loads(demo.mergegate("run", profile, "--json").stdout)
    assert [first.status, again["status"]] == ["released", "nothing new"]
    told = demo.mergegate("verify", str(first.location), "--key", str(keys[1]), "--json")
    assert json.loads(told.stdout)["signed"] == "valid"
    # A watcher sees the bytes of the publication.
    total = sum(path.stat().st_size for path in files_of(Path(first.location)))
    assert seen.publishing[-1] == (total, total, "B")
    assert [done for done, *_ in seen.publishing] == sorted(done for done, *_ in seen.publishing)


def test_what_is_no_key_or_no_release_is_said(release: Path, demo: Project) -> None:
    with pytest.raises(InvalidInput, match="openssl ecparam"):
        sign("demo", {}, release / "README.md")
    with pytest.raises(InvalidInput, match="openssl ecparam"):
        check_release(DirectoryRelease(release), release / "README.md")
    for place, code, words in (
        ("releases/nothing/here", 2, "no such directory"),
        ("profiles", 3, "the provenance that every release of mergegate has"),
    ):
        result = demo.mergegate("verify", place)
        assert (result.exit_code, words in result.output) == (code, True)


STATED_FACTS = {
    "numbers in the card": numbers(CARD),
    "numbers in the compliance sheet": numbers(COMPLIANCE),
    "numbers in the report": numbers(REPORT, r"(?<=>)\d[\d.,]*(?=<)"),
    "numbers in the recipe": numbers(RECIPE),
    "numbers in the statement of changes": numbers("MODIFICATIONS"),
    "letters of a license": numbers("licenses/mit.txt", "[A-Z]"),
    "metadata of the card": numbers(CARD, r"(?<=: )\w+(?=\n)"),
    "names in the report": numbers(REPORT, r"(?<=<td>)[a-z]+"),
    "bill of materials": leaves(BOM),
    "provenance": leaves(PROVENANCE),
}
FORGED = [(kind, part) for kind in STATED_FACTS for part in range(8)]


@pytest.mark.story
@pytest.mark.parametrize(("kind", "part"), sampled_rows(FORGED, FORGED[5::8], pytest.mark.proof))
def test_a_forged_fact_is_noticed_although_all_lists_agree(release: Path, kind: str, part: int) -> None:
    copy = Path(shutil.copytree(release, release.with_name("forged")))
    forgeries = STATED_FACTS[kind](copy)
    forgeries[len(forgeries) * part // 8]()
    refusal_of(relist(release, copy), recompute=True)


@pytest.mark.story
def test_added_files_are_noticed_although_all_lists_agree(release: Path) -> None:
    for name in (".eval_results/gsm8k.yaml", "licenses/other.txt", "special_tokens_map.json", "evidence/x/gate.json"):
        copy = Path(shutil.copytree(release, release.with_name("copy")))
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("{}")
        add = {"name": name, "hashes": [{"content": ""}], "digest": {"sha256": ""}}
        edit(copy / BOM, "components", lambda parts, add=add: [*parts, add])
        edit(copy / PROVENANCE, "subject", lambda parts, add=add: [*parts, add])
        forged = forge(copy)
        assert f"{name}: " in refusal_of(forged, recompute=True)
        shutil.rmtree(forged)


SCORE = "content.models.3.scores.tasks.1.score"
CONSISTENT_FACTS = {
    SCORE: 1.0,
    "content.models.0.likelihoods.perplexity": 1.1,
    "content.verdict.guards.0.drop": -1.0,
}


@pytest.mark.story
@pytest.mark.parametrize("path", CONSISTENT_FACTS)
def test_facts_that_contradict_the_evidence_are_noticed_although_all_documents_agree(release: Path, path: str) -> None:
    edit(release / FACTS, path, CONSISTENT_FACTS[path])
    refusal_of(forge(release, again=True), recompute=True)


# Reproduction.


def test_the_demo_is_reproduced_to_the_byte(demo: Project) -> None:
    result = demo.mergegate("reproduce", "releases/demo/latest", "--parents", RECIPES)
    expect(result, 0, "= model.safetensors")
    assert re.search(r"rebuilt in .* on (cpu|cuda); \d+ files, all identical", result.output)


@pytest.mark.story
def test_parents_are_found_beside_the_same_recipe_in_the_project(demo: Project) -> None:
    shutil.copytree(RECIPES, demo.root / "sources" / "recipes", dirs_exist_ok=True)
    (demo.root / "sources" / "models").symlink_to(PROFILES / "demo" / "models")
    told = json.loads(demo.mergegate("reproduce", "releases/demo/latest", "--json").stdout)
    assert told["status"] == "reproduced"
    assert "model.safetensors" in told["files"]


def test_a_parent_that_changed_is_not_merged(demo: Project, tmp_path: Path) -> None:
    shutil.copytree(PROFILES / "demo" / "models", tmp_path / "models")
    (tmp_path / "recipes").mkdir()
    config = tmp_path / "models" / "base" / "config.json"
    config.write_text(config.read_text() + "\n")
    result = demo.mergegate("reproduce", "releases/demo/latest", "--parents", str(tmp_path / "recipes"))
    expect(result, 2)
    assert re.search(r"(?s)the checkpoint.*that was merged", result.output)


@pytest.mark.story
@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (None, (), r"(?s)rebuilt files differ.*model\.safetensors"),
        ("cuda", ("--device", "cpu"), "the release was built on cuda and rebuilt on cpu; use --device cuda"),
    ],
)
def test_weights_that_the_recipe_does_not_give_are_refused(
    release: Path, demo: Project, device: str | None, options: tuple[str, ...], message: str
) -> None:
    flip(release / WEIGHTS)
    if device:
        edit_provenance(release, "buildDefinition.internalParameters.device", device)
    result = demo.mergegate("reproduce", str(forge(release)), "--parents", RECIPES, *options)
    assert re.search(message, expect(result, 3).output), result.output


def test_a_provenance_of_another_version_is_refused_in_words(release: Path, demo: Project) -> None:
    edit_provenance(release, "buildDefinition.internalParameters.seeds", ...)
    expect(demo.mergegate("reproduce", str(forge(release))), 3, "provenance.json: internalParameters.seeds")


# The recomputed verdict.


@pytest.mark.story
def test_the_verdict_follows_from_the_release_alone(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_store = release.parent / "no-store"
    monkeypatch.setenv("MERGEGATE_HOME", str(no_store))
    result = expect(Project(release.parent).mergegate("verify", release.name, "--verdict", columns=80), 0)
    assert max(map(len, result.output.splitlines())) <= 80
    assert re.search(r"^reverse +reverser +0\.50 \[.*\] +0\.50 \[.*\] +pass *$", result.output, re.MULTILINE)
    assert "The gate's verdict follows from the outcomes in the release: pass." in result.output
    recomputed = mergegate.verify(release, verdict=True).recomputed
    assert recomputed is not None
    statement = json.loads((release / PROVENANCE).read_text())
    assert recomputed.verdict.model_dump(mode="json") == statement["predicate"]["mergegate_verdict"]
    assert recomputed.rounding == ()
    assert mergegate.verify(release).recomputed is None
    assert not no_store.exists()
    assert not (release.parent / ".mergegate").exists()
    # A release under an inconclusive verdict names the setting.
    verdict = recomputed.verdict.model_copy(update={"on_inconclusive": "warn"})
    text = str(replace(recomputed, verdict=verdict, gate_outcome="inconclusive"))
    assert "It was published although it is inconclusive, because the profile sets on_inconclusive: warn." in text
    # Another version with other words verifies the release and its verdict.
    (read,) = read_with_other_words(release)
    assert read["differences"] == []
    files = "".join((release / name).read_text() for name in (CARD, "MODIFICATIONS", EVIDENCE_RECORD))
    assert not any(sentence in files for sentence in read["sentences"])


def swap_two_models(evidence: Evidence) -> None:
    names = {"merge": "reverser", "reverser": "merge"}

    def change(columns: Columns) -> None:
        columns["model"] = [names.get(model, model) for model in columns["model"]]

    evidence.edit_table(OUTCOMES, change)


@pytest.mark.story
@pytest.mark.parametrize(
    "change",
    [*FORGERIES.values(), swap_two_models, record("inputs.guards.0.max_drop", 4.0)],
    ids=[*FORGERIES, "swap two models", "raise a limit"],
)
def test_a_change_is_noticed_by_its_digest_or_else_by_the_verdict(
    release: Path, change: Callable[[Evidence], object]
) -> None:
    change(Evidence(release))
    require_digest_or_verdict_notices(release)


@pytest.mark.story
def test_every_flip_of_an_outcome_is_reported_with_its_guard(release: Path, demo: Project) -> None:
    """Flip an outcome of each model that a guard compares, first one way, then the other."""
    for model, task in (("merge", "copy"), ("merge", "shift"), ("shifter", "shift"), ("base", "copy")):
        copy = Path(shutil.copytree(release, release.parent / f"{model}-{task}"))
        Evidence(copy).flip_outcome(model, task, at=17)
        forged = forge(copy)
        assert f"{task} against" in refusal_of(forged, recompute=True)
        shutil.rmtree(forged)
    flip_one_outcome(Evidence(release))
    result = expect(demo.mergegate("verify", str(forge(release)), "--verdict"), 3)
    assert re.search(r"reverse against reverser: drop: stored 0\.5, recomputed 0\.\d+", result.output)


@pytest.mark.story
def test_a_release_without_evidence_is_verified_only_without_its_verdict(release: Path, demo: Project) -> None:
    remove(release, "evidence/")
    forged = str(forge(release))
    assert demo.mergegate("verify", forged).exit_code == 0
    result = demo.mergegate("verify", forged, "--verdict")
    expect(result, 2, "no file evidence/gate.json, so its verdict cannot be recomputed")


@pytest.mark.story
def test_only_different_numbers_of_another_version_of_the_gate_are_refused(release: Path) -> None:
    evidence = Evidence(release)
    evidence.edit_record("gate_version", 4)
    evidence.edit_record("versions.mergegate", "0.0.9")
    forged = forge(release, again=True)
    check_release(DirectoryRelease(forged), recompute=True)  # The numbers are equal nevertheless.
    Evidence(forged).edit_record("verdict.guards.0.high", lambda high: high + 0.01)
    with pytest.raises(InvalidInput, match=r"verify it with mergegate 0\.0\.9"):
        check_release(DirectoryRelease(forge(forged)), recompute=True)


@pytest.mark.story
def test_last_digits_may_differ_only_with_other_libraries_and_are_named(release: Path) -> None:
    Evidence(release).edit_record("verdict.guards.0.high", lambda high: high * (1 + 1e-13))
    forged = forge(release)
    assert "copy against base: high" in refusal_of(forged, recompute=True)
    Evidence(forged).edit_record("versions.numpy", "1.0")
    recomputed = check_release(DirectoryRelease(forge(forged, again=True)), recompute=True).recomputed
    assert "1 number differs after the ninth digit, because versions differ: numpy 1.0, here" in str(recomputed)


@pytest.mark.story
def test_every_text_in_the_evidence_is_a_name_of_the_run_a_hash_or_a_number(release: Path) -> None:
    with pq.ParquetFile(release / OUTCOMES) as file:
        columns = file.read().to_pydict()
    assert {*columns["model"]} == {"reverser", "shifter", "base", "merge"}
    assert {*columns["task"]} == {"copy", "reverse", "shift"}
    for name in ("doc_hash", "prompt_hash", "target_hash"):
        assert all(re.fullmatch("[0-9a-f]{64}", value) for value in columns[name])
    for name in ("answer", "cluster"):
        assert all(re.fullmatch("[0-9]*", value) for value in columns[name])


@pytest.mark.story
def test_verdicts_of_a_judge_and_a_server_are_listed_as_not_recomputed(released_with_everything: Path) -> None:
    place = released_with_everything / "releases" / "everything" / "latest"
    text = str(mergegate.verify(place, verdict=True).recomputed)
    assert "The gate's verdict follows from the outcomes in the release: pass." in text
    assert re.search(r"Not recomputed, because they need a model or a server: judge \(\w+\), serve \(pass\)\.", text)
    assert "although" not in text, "an inconclusive judge is not the gate's verdict"
