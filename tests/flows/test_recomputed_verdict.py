"""`mergegate verify --verdict` on the released demo: the verdict follows from the release alone, and only from it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from demo_project import Printed, Project
from test_verify_and_reproduce import forge
from typer.testing import CliRunner

import mergegate
from mergegate.flows.cli.app import app
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.gate.verdict_record import EVIDENCE_RECORD, LIKELIHOODS, OUTCOMES
from mergegate.tasks.publish.content import PROVENANCE
from mergegate.tasks.publish.releases.verify import check_release
from mergegate.tasks.publish.targets.directory import DirectoryRelease

Released = tuple[Project, Printed]
Columns = dict[str, list[Any]]


@pytest.fixture
def release(released: Released, tmp_path: Path) -> Path:
    """Return a copy of the demo release, in a directory named after its version."""
    version = released[0].latest.resolve()
    return Path(shutil.copytree(version, tmp_path / version.name))


def edit_table(release: Path, name: str, change: Callable[[Columns], object]) -> None:
    """Change the columns of a table in the release."""
    with pq.ParquetFile(release / name) as file:
        table = file.read()
    columns = table.to_pydict()
    change(columns)
    pq.write_table(pa.table(columns, schema=table.schema), release / name)


def edit_record(release: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the recorded inputs and verdict of the gate."""
    record = json.loads((release / EVIDENCE_RECORD).read_text())
    change(record)
    (release / EVIDENCE_RECORD).write_text(json.dumps(record))


def row_of(columns: Columns, model: str, task: str, at: int = 0) -> int:
    """Return the index of a row of a model on a task."""
    rows = range(len(columns["model"]))
    return [row for row in rows if (columns["model"][row], columns["task"][row]) == (model, task)][at]


def flip_one_outcome(release: Path) -> None:
    def change(columns: Columns) -> None:
        row = row_of(columns, "merge", "reverse")
        columns["outcome"][row] = 1 - columns["outcome"][row]

    edit_table(release, OUTCOMES, change)


def drop_a_document(release: Path) -> None:
    def change(columns: Columns) -> None:
        doc_id = columns["doc_id"][row_of(columns, "merge", "reverse")]
        rows = range(len(columns["model"]))
        kept = [row for row in rows if (columns["task"][row], columns["doc_id"][row]) != ("reverse", doc_id)]
        columns.update({name: [values[row] for row in kept] for name, values in columns.items()})

    edit_table(release, OUTCOMES, change)


def swap_two_models(release: Path) -> None:
    names = {"merge": "reverser", "reverser": "merge"}

    def change(columns: Columns) -> None:
        columns["model"] = [names.get(model, model) for model in columns["model"]]

    edit_table(release, OUTCOMES, change)


def worsen_a_likelihood(release: Path) -> None:
    def change(columns: Columns) -> None:
        columns["loglik"][columns["model"].index("merge")] -= 1e-6

    edit_table(release, LIKELIHOODS, change)


def change_a_prompt(release: Path) -> None:
    def change(columns: Columns) -> None:
        columns["prompt_hash"][row_of(columns, "reverser", "reverse")] = "0" * 64

    edit_table(release, OUTCOMES, change)


def add_an_unknown_model(release: Path) -> None:
    edit_table(release, OUTCOMES, lambda columns: [values.append(values[-1]) for values in columns.values()])


def raise_a_limit(release: Path) -> None:
    edit_record(release, lambda record: record["inputs"]["guards"][0].update(max_drop=4.0))


def lower_the_confidence(release: Path) -> None:
    edit_record(release, lambda record: record["inputs"]["plan"]["rule"].update(confidence=0.9))


def raise_the_drift_limit(release: Path) -> None:
    edit_record(release, lambda record: record["inputs"]["limits"].update(max_increase=0.5))


def state_another_verdict(release: Path) -> None:
    edit_record(release, lambda record: record["verdict"].update(publishable=False))


def remove_a_guard(release: Path) -> None:
    edit_record(release, lambda record: record["inputs"]["guards"].pop())


def empty_a_table(release: Path) -> None:
    (release / OUTCOMES).write_bytes(b"")


def truncate_the_record(release: Path) -> None:
    (release / EVIDENCE_RECORD).write_bytes((release / EVIDENCE_RECORD).read_bytes()[:-100])


FORGERIES = (
    flip_one_outcome,
    drop_a_document,
    swap_two_models,
    worsen_a_likelihood,
    change_a_prompt,
    add_an_unknown_model,
    raise_a_limit,
    lower_the_confidence,
    raise_the_drift_limit,
    state_another_verdict,
    remove_a_guard,
    empty_a_table,
    truncate_the_record,
)


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


@pytest.mark.parametrize("change", FORGERIES)
def test_a_change_is_noticed_by_its_digest_or_else_by_the_verdict(
    release: Path, change: Callable[[Path], None]
) -> None:
    change(release)
    with pytest.raises(Refused, match="sha256 is"):
        check_release(DirectoryRelease(release), recompute=True)
    forged = DirectoryRelease(forge(release))
    check_release(forged)  # All digests agree.
    with pytest.raises(Refused, match=r"does not follow from its outcomes|leads to no verdict"):
        check_release(forged, recompute=True)


def test_a_flipped_outcome_is_reported_with_its_guard_and_both_numbers(release: Path, released: Released) -> None:
    flip_one_outcome(release)
    result = released[0].mergegate("verify", str(forge(release)), "--verdict")
    assert result.exit_code == 3
    assert re.search(r"reverse against reverser: drop: stored 0\.5, recomputed 0\.\d+", result.output)


def test_every_flip_changes_the_verdict(release: Path) -> None:
    """Flip an outcome of each model that a guard compares, first one way, then the other."""
    for model, task in (("merge", "copy"), ("merge", "shift"), ("shifter", "shift"), ("base", "copy")):
        copy = Path(shutil.copytree(release, release.parent / f"{model}-{task}"))

        def change(columns: Columns, model: str = model, task: str = task) -> None:
            row = row_of(columns, model, task, at=17)
            columns["outcome"][row] = 1 - columns["outcome"][row]

        edit_table(copy, OUTCOMES, change)
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

    edit_record(release, change)
    check_release(DirectoryRelease(forge(release)), recompute=True)  # The numbers are equal nevertheless.


def test_different_numbers_of_another_version_name_the_mergegate_to_install(release: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        record["gate_version"] = 4
        record["versions"]["mergegate"] = "0.0.9"
        record["verdict"]["guards"][0]["high"] += 0.01

    edit_record(release, change)
    with pytest.raises(InvalidInput, match=r"verify it with mergegate 0\.0\.9"):
        check_release(DirectoryRelease(forge(release)), recompute=True)


@pytest.mark.parametrize("other_library", [False, True])
def test_last_digits_may_differ_only_with_other_libraries_and_are_named(release: Path, other_library: bool) -> None:
    def change(record: dict[str, Any]) -> None:
        if other_library:
            record["versions"]["numpy"] = "1.0"
        record["verdict"]["guards"][0]["high"] *= 1 + 1e-13

    edit_record(release, change)
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
