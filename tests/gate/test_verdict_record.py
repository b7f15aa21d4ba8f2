"""The recorded inputs of a verdict lead to exactly the same verdict, without texts and with the same bytes."""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gate_samples import PARENT, part, read, worse
from other_words import read_with_other_words
from samples import sampled

from mergegate.merge_core.errors import Refused
from mergegate.tasks.base.stage import Section, Verdict
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.gate import (
    EVIDENCE_RECORD,
    EVIDENCE_TABLES,
    RecordedEvidence,
    VerdictRecord,
    verdict_record,
)
from mergegate.tasks.quality.gate.evidence import GatePlan
from mergegate.tasks.quality.gate.settings import GateRule, Guard
from mergegate.tasks.quality.gate.stage import GateInputs, gate
from mergegate.tasks.quality.gate.verdict_record import (
    OUTCOMES,
    compare_verdicts,
    decide_again,
    joint_verdict,
    plain_verdict,
    record_evidence,
)
from mergegate.tasks.quality.perplexity.settings import DriftLimits

SEEDS = range(8)


def random_inputs(root: Path, seed: int) -> GateInputs:
    """Return random inputs of a gate: binary, graded and clustered tasks, several references, parts and looks."""
    rng = random.Random(seed)
    graded, clustered, as_suite = rng.random() < 0.4, rng.random() < 0.5, rng.random() < 0.5
    releases = ["champion", "anchor"] if rng.random() < 0.5 else []
    tasks = ["arc", "gsm8k", "ifeval"][: rng.randint(1, 3)]
    count, guards = rng.choice([120, 200]), list[Guard]()
    for task in tasks:
        cluster_by = "passage" if clustered and task == "arc" else None
        for reference in (rng.choice(["best parent", "base", "a"]), *releases):
            limits = {"max_drop": rng.choice([1.0, 2.5]), "weight": rng.choice([1.0, 2.0])}
            guards.append(Guard(task=task, guarded_by=reference, cluster_by=cluster_by, **limits))

    def row(task: str, doc: int, metric: str, skill: float) -> DocumentScore:
        score = round(min(1.0, max(0.0, rng.gauss(skill, 0.2))), 3) if graded else float(rng.random() < skill)
        hashes = (f"d{task}{doc}", f"p{task}{doc}", f"t{task}{doc}")
        told = {"cluster": f"passage about the sea {doc // 5}"} if clustered else {}
        told |= {"answer": f"secret answer {rng.randrange(4)}", "answer_tokens": (rng.randrange(5, 50),)}
        told |= {"ended": ("eos",), "thinking_tokens": (None,), "prompt_cut": rng.choice([None, 0])}
        return DocumentScore(task, metric, doc, *hashes, score, **told)

    scores = {}
    for model in ("a", "base", "b", *releases, "merge"):
        skill = rng.choice([0.7, 0.75, 0.8])
        scores[model] = []
        for task in tasks:
            rows = [row(task, doc, metric, skill) for doc in range(count) for metric in ("acc,none", "f1,none")]
            for number, piece in enumerate((rows[:100], rows[100:])):
                scores[model].append(part(root / f"{model}-{task}-{number}", piece))
    plan = GatePlan(
        GateRule(rule="suite" if as_suite else "each", on_inconclusive="warn").for_attempt(rng.randint(1, 3), 3),
        schedule=dict.fromkeys(tasks, (count, 2 * count)),
        parents=("a", "b"),
        anchor_confidence=0.99 if releases else None,
    )
    likelihoods = {"a": read(root / "a", PARENT), "merge": read(root / "merge", worse(0.01))}
    return GateInputs(tuple(guards), scores, likelihoods, DriftLimits(), plan)


def record(inputs: GateInputs, out: Path, *further: Verdict) -> tuple[VerdictRecord, RecordedEvidence]:
    """Write the evidence of the gate's verdict on these inputs, and return its record as read back from the file."""
    out.mkdir()
    written = verdict_record(inputs, gate.work(*inputs), further)
    summary = record_evidence.work(out, written, inputs.scores, inputs.likelihoods)
    return VerdictRecord.model_validate(json.loads((out / EVIDENCE_RECORD).read_text())), summary


def tables_in(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in EVIDENCE_TABLES if (out / name).exists()}


def edited(content: bytes, change: Callable[[dict[str, list[Any]]], object]) -> bytes:
    """Return a table with changed columns."""
    table = pq.read_table(pa.BufferReader(content))
    columns = table.to_pydict()
    change(columns)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=table.schema), sink)
    return bytes(sink.getvalue())


@pytest.mark.story
@pytest.mark.parametrize("seed", sampled(SEEDS, [1], pytest.mark.proof))
def test_the_record_leads_to_exactly_the_same_verdict(tmp_path: Path, seed: int) -> None:
    inputs = random_inputs(tmp_path, seed)
    stored, _ = record(inputs, tmp_path / "out")
    assert stored.verdict == plain_verdict(gate.work(*inputs))
    assert compare_verdicts(stored.verdict, plain_verdict(decide_again(stored, tables_in(tmp_path / "out")))) == ()


@pytest.mark.proof
def test_words_of_another_version_make_no_difference(tmp_path: Path) -> None:
    records = {}
    for seed in SEEDS[:4]:
        records[tmp_path / f"out{seed}"], _ = record(random_inputs(tmp_path / str(seed), seed), tmp_path / f"out{seed}")
    read = read_with_other_words(*records)
    for stored, other in zip(records.values(), read, strict=True):
        assert other["differences"] == []
        assert other["sentences"][-1] not in json.dumps(stored.verdict)
    assert {stored.verdict["outcome"] for stored in records.values()} >= {"fail", "inconclusive"}


@pytest.mark.story
def test_a_changed_number_in_a_sentence_is_a_difference(tmp_path: Path) -> None:
    verdict = record(random_inputs(tmp_path, 1), tmp_path / "out")[0].verdict
    guard = verdict["guards"][0]
    reason = guard["reason"]
    for change in (re.sub(r"\d", "7", reason, count=1), f"{reason}. 3", "", re.sub(r"\d", "", reason)):
        changed = verdict | {"guards": [guard | {"reason": change}, *verdict["guards"][1:]]}
        (difference,) = compare_verdicts(changed, verdict)
        assert difference.stored == change


@pytest.mark.story
@pytest.mark.parametrize("seed", sampled(SEEDS[:3], [0], pytest.mark.proof))
def test_the_same_inputs_give_the_same_bytes_in_any_directory(tmp_path: Path, seed: int) -> None:
    files = []
    for name in ("first", "second"):
        record(random_inputs(tmp_path / name, seed), tmp_path / f"{name}-out")
        files.append({path.name: path.read_bytes() for path in (tmp_path / f"{name}-out" / "evidence").iterdir()})
    assert files[0] == files[1]
    assert sorted(files[0]) == ["gate.json", "likelihoods.parquet", "outcomes.parquet"]


@pytest.mark.story
@pytest.mark.parametrize("seed", sampled(SEEDS[:4], [0], pytest.mark.proof))
def test_a_changed_outcome_of_a_compared_model_changes_the_verdict(tmp_path: Path, seed: int) -> None:
    inputs = random_inputs(tmp_path, seed)
    stored, _ = record(inputs, tmp_path / "out")
    tables, rng = tables_in(tmp_path / "out"), random.Random(seed)
    for model in ("merge", str(stored.verdict["guards"][0]["reference"])):

        def change(columns: dict[str, list[Any]], model: str = model) -> None:
            places = zip(columns["model"], columns["task"], columns["metric"], strict=True)
            wanted = (model, stored.verdict["guards"][0]["task"], "acc,none")
            at = rng.choice([at for at, place in enumerate(places) if place == wanted])
            columns["outcome"][at] = 1 - columns["outcome"][at] if columns["outcome"][at] != 0.5 else 0.25

        changed = tables | {OUTCOMES: edited(tables[OUTCOMES], change)}
        assert compare_verdicts(stored.verdict, plain_verdict(decide_again(stored, changed)))


def test_the_tables_have_every_column_of_a_score_and_no_text_or_duration_is_recorded(tmp_path: Path) -> None:
    inputs = random_inputs(tmp_path, 4)
    guards = (Guard(task="arc", guarded_by="base", system_instruction="our secret"),)
    stored, _ = record(inputs._replace(guards=guards), tmp_path / "out")
    assert "our secret" not in (tmp_path / "out" / EVIDENCE_RECORD).read_text()
    assert "seconds" not in stored.inputs["scores"]["merge"][0]
    columns = pq.read_table(tmp_path / "out" / OUTCOMES).to_pydict()
    assert list(columns) == ["model", "part", *DocumentScore._fields]
    for name in ("answer", "cluster"):
        assert all(value.isdigit() or not value for value in columns[name])
    # Two models have the same number exactly if they have the same answer.
    answers = {}
    for model, parts in inputs.scores.items():
        for artifact in parts:
            for score in pq.read_table(artifact.directory / "outcomes.parquet").to_pylist():
                answers[model, score["task"], score["doc_id"], score["metric"]] = score["answer"]
    keys = list(zip(columns["model"], columns["task"], columns["doc_id"], columns["metric"], strict=True))
    numbers = dict(zip(keys, columns["answer"], strict=True))
    for key in keys:
        other = ("merge", *key[1:])
        assert (numbers[key] == numbers[other]) == (answers[key] == answers[other])


@pytest.mark.story
def test_a_document_takes_about_a_hundred_bytes_for_any_number_of_models(tmp_path: Path) -> None:
    """Hashes are random, so they cannot be compressed. The models share them."""
    rng, sizes, documents = random.Random(0), [], 2000

    def row(doc: int) -> DocumentScore:
        hashes = (sha256(f"{kind}{doc}".encode()).hexdigest() for kind in ("document", "prompt", "target"))
        told = {"ended": ("eos",), "answer_tokens": (rng.randrange(50, 400),), "answer": str(rng.random())}
        return DocumentScore("gsm8k", "acc,none", doc, *hashes, float(rng.random() < 0.8), **told)

    for names in (("base", "merge"), ("base", "merge", "a", "b")):
        out = tmp_path / str(len(names))
        scores = {
            name: [part(tmp_path / f"{len(names)}-{name}", [row(doc) for doc in range(documents)])] for name in names
        }
        guards = (Guard(task="gsm8k", guarded_by="base"),)
        record(GateInputs(guards, scores, {}, None, GatePlan(GateRule())), out)
        sizes.append(sum(path.stat().st_size for path in (out / "evidence").iterdir()))
    assert sizes[0] < 130 * documents
    assert sizes[1] < 1.2 * sizes[0]


@pytest.mark.story
def test_the_order_of_metric_patterns_is_recorded(tmp_path: Path) -> None:
    """Sorted patterns would choose another metric, because the first matching pattern applies."""
    inputs = random_inputs(tmp_path, 1)
    guards = (Guard(task="arc", guarded_by="base", metric={"ar*": "f1,none", "*": "acc,none"}),)
    stored, _ = record(inputs._replace(guards=guards), tmp_path / "out")
    assert list(stored.inputs["guards"][0]["metric"]) == ["ar*", "*"]
    assert stored.verdict["guards"][0]["metric"] == "f1,none"


def test_the_recorded_inputs_are_all_arguments_of_the_gate() -> None:
    assert GateInputs._fields == tuple(inspect.signature(gate.work).parameters)


@pytest.mark.story
def test_a_verdict_that_does_not_follow_is_not_published(tmp_path: Path) -> None:
    inputs = random_inputs(tmp_path, 3)
    verdict = gate.work(*inputs)
    guards = (verdict.guards[0].model_copy(update={"drop": -5.0}), *verdict.guards[1:])
    (tmp_path / "out").mkdir()
    forged = verdict_record(inputs, verdict.model_copy(update={"guards": guards}), ())
    with pytest.raises(Refused, match="drop: stored -5, recomputed"):
        record_evidence.work(tmp_path / "out", forged, inputs.scores, inputs.likelihoods)


def test_a_broken_merge_and_a_gate_without_guards_can_be_recorded(tmp_path: Path) -> None:
    plan = GatePlan(GateRule())
    likelihoods = {"base": read(tmp_path / "base", PARENT), "merge": read(tmp_path / "merge", worse(3.0))}
    for number, (judged, limits) in enumerate([(likelihoods, DriftLimits()), ({}, None)]):
        inputs = GateInputs((), {}, judged, limits, plan)
        out = tmp_path / f"out{number}"
        stored, summary = record(inputs, out)
        assert plain_verdict(decide_again(stored, tables_in(out))) == stored.verdict
        assert summary.summary() == ("1,000 likelihoods of 2 models", "no documents of 0 models")[number]


@pytest.mark.story
def test_a_judge_is_part_of_the_joint_verdict_but_not_recomputed(tmp_path: Path) -> None:
    inputs = random_inputs(tmp_path, 4)
    told = {"outcome": "fail", "publishable": False, "reasons": ("judge: worse",)}
    judge = Verdict(name="judge", **told, evidence=DriftLimits(), section=Section(title="Judge"))
    stored, _ = record(inputs, tmp_path / "out", judge)
    joint = joint_verdict(stored, decide_again(stored, tables_in(tmp_path / "out")))
    assert (joint.outcome, joint.publishable, joint.reasons[0]) == ("fail", False, "judge: worse")
    assert stored.further_verdicts[0].name == "judge"
