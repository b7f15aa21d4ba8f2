"""`mergegate verify --verdict` on the released demo: the verdict follows from the release alone, and only from it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from demo_project import Printed, Project
from forged_evidence import FORGERIES, Columns, Evidence, flip_one_outcome, row_of
from other_words import read_with_other_words
from test_verify_and_reproduce import forge
from typer.testing import CliRunner

import mergegate
from mergegate.flows.cli.app import app
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.gate.verdict_record import EVIDENCE_RECORD, LIKELIHOODS, OUTCOMES
from mergegate.tasks.publish.content import PROVENANCE
from mergegate.tasks.publish.releases.verify import check_release
from mergegate.tasks.publish.targets.directory import DirectoryRelease

pytestmark = pytest.mark.story

Released = tuple[Project, Printed]


@pytest.fixture
def release(released: Released, tmp_path: Path) -> Path:
    """Return a copy of the demo release, in a directory named after its version."""
    version = released[0].latest.resolve()
    return Path(shutil.copytree(version, tmp_path / version.name))


def swap_two_models(evidence: Evidence) -> None:
    names = {"merge": "reverser", "reverser": "merge"}

    def change(columns: Columns) -> None:
        columns["model"] = [names.get(model, model) for model in columns["model"]]

    evidence.edit_table(OUTCOMES, change)


def change_a_prompt(evidence: Evidence) -> None:
    def change(columns: Columns) -> None:
        columns["prompt_hash"][row_of(columns, "reverser")] = "0" * 64

    evidence.edit_table(OUTCOMES, change)


def raise_a_limit(evidence: Evidence) -> None:
    evidence.edit_record(lambda record: record["inputs"]["guards"][0].update(max_drop=4.0))


def test_the_verdict_follows_from_the_release_alone(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(release.parent)
    monkeypatch.setenv("MERGEGATE_HOME", str(release.parent / "no-store"))
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["verify", release.name, "--verdict"])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert re.search(r"^reverse +reverser +0\.50 \[.*\] +0\.50 \[.*\] +pass *$", result.output, re.MULTILINE)
    assert "The gate's verdict follows from the outcomes in the release: pass." in result.output
    assert not (release.parent / "no-store").exists()


def test_the_recomputed_verdict_equals_the_provenance(release: Path) -> None:
    recomputed = mergegate.verify(release, verdict=True).recomputed
    assert recomputed is not None
    statement = json.loads((release / PROVENANCE).read_text())
    assert recomputed.verdict.model_dump(mode="json") == statement["predicate"]["mergegate_verdict"]
    assert recomputed.rounding == ()
    assert mergegate.verify(release).recomputed is None


@pytest.mark.parametrize("change", [*FORGERIES, swap_two_models, change_a_prompt, raise_a_limit])
def test_a_change_is_noticed_by_its_digest_or_else_by_the_verdict(
    release: Path, change: Callable[[Evidence], None]
) -> None:
    change(Evidence(release))
    with pytest.raises(Refused, match="sha256 is"):
        check_release(DirectoryRelease(release), recompute=True)
    forged = DirectoryRelease(forge(release))
    check_release(forged)  # All digests agree.
    with pytest.raises(Refused, match=r"does not follow from its outcomes|leads to no verdict"):
        check_release(forged, recompute=True)


def test_a_flipped_outcome_is_reported_with_its_guard_and_both_numbers(release: Path, released: Released) -> None:
    flip_one_outcome(Evidence(release))
    result = released[0].mergegate("verify", str(forge(release)), "--verdict")
    assert result.exit_code == 3
    assert re.search(r"reverse against reverser: drop: stored 0\.5, recomputed 0\.\d+", result.output)


def test_every_flip_changes_the_verdict(release: Path) -> None:
    """Flip an outcome of each model that a guard compares, first one way, then the other."""
    for model, task in (("merge", "copy"), ("merge", "shift"), ("shifter", "shift"), ("base", "copy")):
        copy = Path(shutil.copytree(release, release.parent / f"{model}-{task}"))

        Evidence(copy).flip_outcome(model, task, at=17)
        forged = forge(copy)
        with pytest.raises(Refused, match=f"{task} against"):
            check_release(DirectoryRelease(forged), recompute=True)
        shutil.rmtree(forged)


def test_a_release_without_evidence_is_verified_only_without_its_verdict(release: Path, released: Released) -> None:
    for name in (EVIDENCE_RECORD, OUTCOMES, LIKELIHOODS):
        (release / name).unlink()
    for name, key in (("bom.json", "components"), (PROVENANCE, "subject")):
        content = json.loads((release / name).read_text())
        content[key] = [item for item in content[key] if not item["name"].startswith("evidence/")]
        (release / name).write_text(json.dumps(content))
    forged = str(forge(release))
    assert released[0].mergegate("verify", forged).exit_code == 0
    result = released[0].mergegate("verify", forged, "--verdict")
    assert result.exit_code == 2
    assert "no file evidence/gate.json, so its verdict cannot be recomputed" in result.output


def test_a_verdict_of_another_version_of_the_gate_is_not_refused(release: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        record["gate_version"] = 4
        record["versions"]["mergegate"] = "0.0.9"

    Evidence(release).edit_record(change)
    check_release(DirectoryRelease(forge(release)), recompute=True)  # The numbers are equal nevertheless.


def test_a_version_with_other_words_verifies_the_release_and_its_verdict(release: Path) -> None:
    (read,) = read_with_other_words(release)
    assert read["differences"] == []
    files = "".join(
        path.read_text() for path in (release / "README.md", release / "MODIFICATIONS", release / EVIDENCE_RECORD)
    )
    assert not any(sentence in files for sentence in read["sentences"])


def test_different_numbers_of_another_version_name_the_mergegate_to_install(release: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        record["gate_version"] = 4
        record["versions"]["mergegate"] = "0.0.9"
        record["verdict"]["guards"][0]["high"] += 0.01

    Evidence(release).edit_record(change)
    with pytest.raises(InvalidInput, match=r"verify it with mergegate 0\.0\.9"):
        check_release(DirectoryRelease(forge(release)), recompute=True)


@pytest.mark.parametrize("other_library", [False, True])
def test_last_digits_may_differ_only_with_other_libraries_and_are_named(release: Path, other_library: bool) -> None:
    def change(record: dict[str, Any]) -> None:
        if other_library:
            record["versions"]["numpy"] = "1.0"
        record["verdict"]["guards"][0]["high"] *= 1 + 1e-13

    Evidence(release).edit_record(change)
    forged = DirectoryRelease(forge(release))
    if not other_library:
        with pytest.raises(Refused, match="copy against base: high"):
            check_release(forged, recompute=True)
        return
    recomputed = check_release(forged, recompute=True).recomputed
    assert recomputed is not None
    assert "1 number differs after the ninth digit, because versions differ: numpy 1.0, here" in str(recomputed)


def test_the_evidence_has_no_texts(release: Path, released: Released) -> None:
    """Every text in the tables is a name of the run, a hash or a number."""
    with pq.ParquetFile(release / OUTCOMES) as file:
        columns = file.read().to_pydict()
    assert {*columns["model"]} == {"reverser", "shifter", "base", "merge"}
    assert {*columns["task"]} == {"copy", "reverse", "shift"}
    for name in ("doc_hash", "prompt_hash", "target_hash"):
        assert all(re.fullmatch("[0-9a-f]{64}", value) for value in columns[name])
    for name in ("answer", "cluster"):
        assert all(re.fullmatch("[0-9]*", value) for value in columns[name])


def test_verdicts_of_a_judge_and_a_server_are_listed_as_not_recomputed(released_with_everything: Path) -> None:
    text = str(
        mergegate.verify(released_with_everything / "releases" / "everything" / "latest", verdict=True).recomputed
    )
    assert "The gate's verdict follows from the outcomes in the release: pass." in text
    assert re.search(r"Not recomputed, because they need a model or a server: judge \(\w+\), serve \(pass\)\.", text)
    assert "although" not in text, "an inconclusive judge is not the gate's verdict"


def test_a_release_under_an_inconclusive_verdict_names_the_setting(release: Path) -> None:
    recomputed = mergegate.verify(release, verdict=True).recomputed
    assert recomputed is not None
    verdict = recomputed.verdict.model_copy(update={"on_inconclusive": "warn"})
    text = str(replace(recomputed, verdict=verdict, gate_outcome="inconclusive"))
    assert "It was published although it is inconclusive, because the profile sets on_inconclusive: warn." in text
