"""Logs of inspect_ai yield the scores that inspect_ai computed, and inconsistent logs are refused."""

from __future__ import annotations

import io
import json
import math
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from garbage import OTHER_VALUES, values_in
from hypothesis import given, settings
from hypothesis import strategies as st
from inspect_ai_runs import run_inspect

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation.results import inspect_log
from mergegate.tasks.quality.evaluation.results.contract import (
    TaskResults,
    precision_differences,
    require_same_conditions,
)
from mergegate.tasks.quality.evaluation.results.files import find_results, read_task
from mergegate.tasks.quality.evaluation.scoring.document_scores import pair_documents
from mergegate.tasks.quality.evaluation.scoring.metrics import choose_metrics

VALIDATORS = Path(__file__).resolve().parents[2] / ".venv-validators" / "bin" / "python"
SAMPLES = Path(__file__).parent / "inspect_samples"
RECORDED = {path.parent.name: path for path in SAMPLES.glob("*/*")}
# mergegate does not read the events.
UNREAD = ("events", "events_data", "stats", "_journal/start.json", "_journal/summaries/1.json")
GRADES = ["1", "0", "0.25", "true", "false", '"C"', '"I"', '"P"', '"N"', '"yes"', '"No"', '"0.75"']


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run inspect_ai once, and return path and reductions of each log by name."""
    if not VALIDATORS.exists():
        pytest.skip("make .venv-validators/ready first")
    root = tmp_path_factory.mktemp("logs")

    def task(log: str, samples: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        defaults = {"log_dir": str(root / log), "model": "one", "scorer": "match", "format": "eval", "name": "letters"}
        return {**defaults, "samples": samples, **more}

    def words(wrong: int) -> list[dict[str, Any]]:
        return [
            {"id": f"q/{n}", "input": f"question {n}", "target": "yes", "metadata": {"kind": str(n % 2)}}
            | {"answers": ["no…" if n % 5 == wrong else "yes"]}
            for n in range(12)
        ]

    graded = [
        {"id": n, "input": f"grade {n}", "target": "", "answers": [GRADES[n], GRADES[-n], GRADES[n]]} for n in range(12)
    ]
    choices = [
        {"id": n, "input": f"choose {n}", "target": "ABCD"[n % 4], "choices": list("wxyz"), "answers": ["ANSWER: B"]}
        for n in range(8)
    ]
    tasks = {
        "one": task("one", words(1)),
        "other": task("other", words(3), model="other"),
        "json": task("json", words(1), format="json"),
        "graded": task("graded", graded, name="grades", scorer="graded", epochs=3),
        "choice": task("choice", choices, name="picks", scorer="choice", format="json"),
    }
    return dict(zip(tasks, run_inspect(list(tasks.values()), VALIDATORS), strict=True))


def read(path: str | Path, task: str = "letters") -> TaskResults:
    return read_task(find_results(Path(path)), task)


def changed_log(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the parts of a log by name, such as ``header.json``. A JSON log is one part, ``log``."""
    parts = log_parts(path)
    change(parts)
    write_parts(path, parts)
    return path


def log_parts(path: Path) -> dict[str, Any]:
    """Return the JSON of every part of a log, decompressed by pyarrow."""
    if path.suffix == ".json":
        return {"log": json.loads(path.read_text())}
    data, parts = path.read_bytes(), {}
    for info in zipfile.ZipFile(io.BytesIO(data)).infolist():
        start = info.header_offset + 30 + sum(struct.unpack("<HH", data[info.header_offset + 26 :][:4]))
        raw = data[start : start + info.compress_size]
        parts[info.filename] = json.loads(
            pa.decompress(raw, info.file_size, codec="zstd", asbytes=True) if info.compress_type == 93 else raw
        )
    return parts


def write_parts(path: Path, parts: dict[str, Any]) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(parts["log"]))
        return
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, json.dumps(content))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Copy a log, for a test to damage."""
    return lambda name: Path(shutil.copy(RECORDED[name], tmp_path))


@pytest.mark.story
@pytest.mark.parametrize(
    ("name", "task"),
    [("one", "letters"), ("graded", "grades")],
)
def test_logs_give_the_scores_of_inspect_ai(logs: dict[str, dict[str, Any]], name: str, task: str) -> None:
    results = read(logs[name]["path"], task)
    ids = results.names or {row.doc_id: str(row.doc_id) for row in results.outcomes}
    found: dict[str, dict[str, float]] = {}
    for row in results.outcomes:
        found.setdefault(row.metric, {})[ids[row.doc_id]] = row.outcome
    theirs = logs[name]["reductions"]
    expected = {"match/accuracy": theirs["match"]} if "match" in theirs else {"graded/mean": theirs["graded"]}
    for metric, key in (("several/same/mean", "same"), ("several/right/accuracy", "right")):
        if "several" in theirs:
            expected[metric] = {document: value[key] for document, value in theirs["several"].items()}
    assert {metric: pytest.approx(scores) for metric, scores in expected.items()}.items() <= found.items()
    assert all(0 < sum(scores.values()) < len(scores) for scores in expected.values())  # mixed outcomes


@pytest.mark.proof
def test_recorded_logs_are_like_those_of_inspect_ai(logs: dict[str, dict[str, Any]]) -> None:
    assert len(RECORDED) == 4
    for name, path in RECORDED.items():
        task = "picks" if name == "choice" else "letters"
        recorded, current = read(path, task), read(logs[name]["path"], task)
        assert recorded.outcomes == current.outcomes
        require_same_conditions(recorded, current, name)


def test_both_formats_pair_document_by_document() -> None:
    results = [read(SAMPLES / name) for name in ("one", "json", "other")]
    for reference in results:
        for merge in results:
            require_same_conditions(reference, merge, "letters")
            pairs = pair_documents(reference.outcomes, merge.outcomes, "match/accuracy", "letters")
            assert len(pairs.documents) == 12
            assert (pairs.reference == pairs.merge) == (reference.outcomes == merge.outcomes)
    assert results[0].outcomes == results[1].outcomes
    assert len(set(results[0].outcomes) & set(results[2].outcomes)) < 12
    assert precision_differences(results[0], results[2]) == ()


def test_samples_have_their_cluster_and_choices_their_chance() -> None:
    file = find_results(RECORDED["one"])
    assert {row.cluster for row in read_task(file, "letters", "kind").outcomes} == {"0", "1"}
    with pytest.raises(InvalidInput, match="did you mean 'kind'"):
        read_task(file, "letters", "kid")
    picks = read(RECORDED["choice"], "picks").outcomes
    assert [(row.doc_id, row.outcome, row.chance) for row in picks] == [(n, n % 4 == 1, 0.25) for n in range(8)]


def test_cut_answers_are_reported_and_count_as_scored() -> None:
    results = read(RECORDED["one"])
    assert [warning.partition(" in ")[0] for warning in results.warnings] == ["3 of 12 answers"]
    assert not any(row.is_cut_off for row in results.outcomes)  # as in lm-eval's files, which do not tell


@pytest.mark.proof
@pytest.mark.parametrize("name", ["one", "json"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_altered_log_is_refused_or_means_the_same(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / f"altered{RECORDED[name].suffix}"
    original, parts = read(RECORDED[name]), log_parts(RECORDED[name])
    place = data.draw(st.sampled_from(list(values_in(parts, UNREAD))))
    action = data.draw(st.sampled_from(("replace", "remove", "replace")))
    inner = parts
    for key in place[:-1]:
        inner = inner[key]
    if action == "remove":
        del inner[place[-1]]  # type: ignore[arg-type]
    else:
        inner[place[-1]] = data.draw(st.sampled_from(OTHER_VALUES))  # type: ignore[index]
    refusal, pairs = "", None
    try:
        write_parts(path, parts)
        changed = read(path)
        require_same_conditions(original, changed, "changed")
        rows = choose_metrics(changed.outcomes, "match/accuracy", "changed").judge(changed.outcomes, "changed")
        pairs = pair_documents(original.outcomes, rows, "match/accuracy", "changed")
    except InvalidInput as error:
        refusal = str(error)
    except KeyError:
        assert path.suffix == ".json"
        assert place == ("log",)  # nothing is left to write
        return
    assert pairs is None or (pairs.reference == pairs.merge and len(pairs.documents) == 12)
    assert pairs is not None or refusal.startswith(("changed", str(path.parent)))


def first_sample(parts: dict[str, Any]) -> dict[str, Any]:
    sample: dict[str, Any] = parts["samples/q/0_epoch_1.json"]
    return sample


def first_score(parts: dict[str, Any]) -> dict[str, Any]:
    score: dict[str, Any] = first_sample(parts)["scores"]["match"]
    return score


def swap_scores(parts: dict[str, Any]) -> None:
    first, second = (parts[f"samples/q/{n}_epoch_1.json"] for n in (0, 1))
    first["scores"], second["scores"] = second["scores"], first["scores"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop("samples/q/3_epoch_1.json"), "11 samples, of 12 in its dataset.*'q/3'"),
        (lambda parts: parts.pop("header.json"), "eval-retry"),
        (lambda parts: parts["header.json"].update(status="cancelled"), "'cancelled'"),
        (lambda parts: parts["header.json"].update(invalidated=True), "invalidated"),
        (lambda parts: parts["header.json"].update(version=1), "version: 1"),
        (lambda parts: parts["header.json"]["results"].update(early_stopping={}), "stopped early"),
        (lambda parts: parts["header.json"]["results"].update(completed_samples=11), "11 of 12 were completed"),
        (lambda parts: first_sample(parts).update(error={"message": "secret"}), "sample 'q/0'.*ended with an error"),
        (lambda parts: first_sample(parts).update(invalidation={}), "sample 'q/0'.*invalidated"),
        (lambda parts: first_sample(parts).update(limit={"type": "operator", "limit": 1}), "operator ended it"),
        (lambda parts: first_score(parts).update(history=[{}]), "match was edited"),
        (lambda parts: first_sample(parts).update(id="q/1"), "sample 'q/1' of epoch 1"),
        (lambda parts: first_score(parts).update(value="I"), "not the mean of its samples"),
        (lambda parts: first_score(parts).update(value="excellent"), "C, P, I and N"),
        (lambda parts: first_score(parts).update(value=math.nan), "not the mean"),
        (lambda parts: swap_scores(parts), "differs from its summary"),
        (lambda parts: parts["reductions.json"][0]["samples"][0].update(value=0), "a different score of sample 'q/0'"),
        (lambda parts: parts["summaries.json"].pop(), "differs from its summary"),
        (lambda parts: parts.update({"samples/q/0_epoch_1/sample.json": {}}), "in several parts"),
    ],
)
def test_incomplete_and_inconsistent_logs_are_refused(
    copied: Callable[[str], Path], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        read(changed_log(copied("one"), change))
    assert "secret" not in str(caught.value)


def test_the_samples_of_another_log_are_refused(copied: Callable[[str], Path]) -> None:
    samples = {name: part for name, part in log_parts(RECORDED["other"]).items() if name.startswith("samples/")}
    with pytest.raises(InvalidInput, match=r"not the mean|differs from its summary"):
        read(changed_log(copied("one"), lambda parts: parts.update(samples)))
    with pytest.raises(InvalidInput, match=r"not the mean|a different score"):
        read(changed_log(copied("json"), lambda parts: parts["log"].update(samples=list(samples.values()))))


@pytest.mark.parametrize(
    ("condition", "change"),
    [
        ("task_version", lambda header: header["eval"].update(task_version=2)),
        ("task_args.shots", lambda header: header["eval"].update(task_args={"shots": 5})),
        ("generation.temperature", lambda header: header["eval"]["model_generate_config"].update(temperature=1)),
        ("generation.max_tokens", lambda header: header["plan"]["config"].update(max_tokens=1)),
        ("solver", lambda header: header["plan"]["steps"][0]["params"].update(template="Think.")),
        ("scorers", lambda header: header["eval"]["scorers"][0]["options"].update(ignore_case=False)),
        ("package.inspect_ai", lambda header: header["eval"]["packages"].update(inspect_ai="0.3.1")),
        ("limit.token_limit", lambda header: header["eval"]["config"].update(token_limit=100)),
        ("role.grader", lambda header: header["eval"].update(model_roles={"grader": {"model": "a/b"}})),
        ("provider", lambda header: header["eval"].update(model="vllm/one")),
    ],
)
def test_different_conditions_are_refused(
    copied: Callable[[str], Path], condition: str, change: Callable[[Any], object]
) -> None:
    path = changed_log(copied("one"), lambda parts: change(parts["header.json"]))
    with pytest.raises(InvalidInput, match=f"letters: different {condition}: "):
        require_same_conditions(read(RECORDED["one"]), read(path), "letters")


def test_models_that_grade_their_own_answers_are_refused(copied: Callable[[str], Path]) -> None:
    path = copied("one")

    def results(model: str) -> TaskResults:
        def change(parts: dict[str, Any]) -> None:
            parts["header.json"]["eval"]["model"] = f"replay/{model}"
            parts["header.json"]["eval"]["scorers"][0]["name"] = "model_graded_qa"

        return read(changed_log(path, change))

    with pytest.raises(InvalidInput, match=r"different grader: replay/one in .*, replay/other"):
        require_same_conditions(results("one"), results("other"), "letters")


def test_model_arguments_are_reported_without_paths_and_secrets(copied: Callable[[str], Path]) -> None:
    arguments = {"device": "cuda", "model_path": "/a", "api_key": "secret"}
    path = copied("one")
    before = read(path)
    changed_log(path, lambda parts: parts["header.json"]["eval"].update(model_args=arguments))
    assert precision_differences(before, read(path)) == ("model_args.device None and cuda",)


def test_a_log_of_other_samples_names_one(copied: Callable[[str], Path]) -> None:
    path = copied("json")

    def change(parts: dict[str, Any]) -> None:
        log = parts["log"]
        log["samples"][0]["id"] = log["eval"]["dataset"]["sample_ids"][0] = "new"
        log["reductions"][0]["samples"][0]["sample_id"] = "new"

    with pytest.raises(InvalidInput, match="a score of sample 'new' on one side only"):
        require_same_conditions(read(RECORDED["json"]), read(changed_log(path, change)), "letters")


def test_hostile_zips_are_refused(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = copied("one")
    data = path.read_bytes()
    monkeypatch.setattr(inspect_log, "MAX_SAMPLE_BYTES", 1000)  # every sample is larger
    with pytest.raises(InvalidInput, match="at most 1000 bytes"):
        read(path)
    monkeypatch.undo()
    # A list of parts that understates the size of a part: no more than that is decompressed.
    start = data.rfind(b"PK\x01\x02")
    path.write_bytes(data[: start + 24] + struct.pack("<I", 10) + data[start + 28 :])
    with pytest.raises(InvalidInput, match="the bytes differ from their checksum"):
        read(path)
    for end in (0, 3, 100, len(data) - 30):  # cut off
        path.write_bytes(data[:end])
        with pytest.raises(InvalidInput, match=str(path)):
            read(path)
    parts = {"../../evil.json": {}, "/etc/evil.json": {}}
    path.write_bytes(data)
    assert read(changed_log(path, lambda contents: contents.update(parts))).outcomes  # never extracted
    assert not list(tmp_path.parent.glob("evil*"))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("header.json", "{}")
    with pytest.raises(InvalidInput, match="contains a part twice"):
        read(path)


def test_logs_of_two_models_are_ambiguous(copied: Callable[[str], Path]) -> None:
    copied("one")
    with pytest.raises(InvalidInput, match="results of 2 models"):
        find_results(copied("other").parent)
