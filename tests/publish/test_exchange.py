"""The results in a release are exported as logs of inspect_ai, which its library reads."""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq
import pytest
from gate_samples import PARENT, part, read, worse
from release_samples import COMMIT, VALIDATORS, needs_validators, publishable, stored, write_release
from samples import sampled

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.quality.evaluation.results import find_results, read_task
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.gate.evidence import GatePlan
from mergegate.tasks.quality.gate.settings import GateRule, Guard
from mergegate.tasks.quality.gate.stage import GateInputs, gate
from mergegate.tasks.quality.gate.verdict_record import OUTCOMES, record_evidence, verdict_record
from mergegate.tasks.quality.perplexity.settings import DriftLimits
from mergegate.tasks.release.publish.releases import VerifiedRelease, check_release, inspect_logs, read_release_results
from mergegate.tasks.release.publish.targets import PublishedRelease, find_release

NOW = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
Exports: TypeAlias = Callable[[int], tuple[Path, Path]]
DOCUMENTS = 24
SEEDS = (1, 0)  # a random sample of the tasks and a group; all tasks
# Metrics of each task, and the direction and the values of each metric: shares, grades, error rates, marks.
TASKS: Mapping[str, Mapping[str, str]] = {
    "arc": {"acc,none": "share", "acc_norm,none": "grade"},
    "gsm8k": {"exact_match,strict-match": "share", "exact_match,flexible-extract": "share"},  # a thinking model
    "speech": {"wer,none": "error"},
    "search": {"ndcg@10,none": "grade", "mrr@10,none": "grade", "recall@5,none": "grade"},
    "essay": {"marks,none": "marks"},
}
GROUP = {"bbh": {"acc_norm,none": "share"}, "math": {"exact_match,none": "grade"}, "noise": {"cer,none": "error"}}
CHECK = """
import json, sys
from pathlib import Path
from inspect_ai.log import list_eval_logs, read_eval_log, recompute_metrics, write_eval_log

def metrics(log):
    return {s.name: {m.name: m.value for m in s.metrics.values()} for s in log.results.scores}

def read(root):
    found = []
    for info in list_eval_logs(str(root)):
        log = read_eval_log(info)
        write_eval_log(log, str(root.parent / "converted.eval"))
        again = read_eval_log(str(root.parent / "converted.eval"))
        samples = [{"id": s.id, "scores": {n: v.value for n, v in s.scores.items()}, "metadata": s.metadata,
                    "chances": {n: {**s.metadata, **(v.metadata or {})}.get("chance") for n, v in s.scores.items()},
                    "stops": [c.stop_reason for c in s.output.choices]} for s in again.samples]
        stated = metrics(log)
        recompute_metrics(again)
        found.append({"model": log.eval.metadata["mergegate"]["model"], "task": log.eval.task,
            "id": log.eval.eval_id, "created": log.eval.created,
            "stated": stated, "recomputed": metrics(again), "samples": samples})
    return found

json.dump([read(Path(root)) for root in sys.argv[1:]], sys.stdout)
"""


def random_scores(rng: random.Random, task: str, leaf: str, kinds: Mapping[str, str]) -> list[DocumentScore]:
    """Return the scores of one model on one task, as a real evaluation might give them."""
    rows = []
    for doc in range(DOCUMENTS):
        hashes = [hashlib.sha256(f"{part}{leaf}{doc}".encode()).hexdigest() for part in ("doc", "prompt", "target")]
        answer = {"answer": f"secret {rng.randrange(3)}", "prompt_cut": rng.choice([None, 0, 3])}
        if task == "arc":
            answer |= {"cluster": f"passage {doc // 4}"}
        if task == "gsm8k":
            answer |= {"ended": (rng.choice(["stop", "eos", "length", "context"]),), "answer_tokens": (doc + 3,)}
            answer |= {"thinking_tokens": (rng.randrange(1, doc + 3),), "budgets": (64, 128)}
        for metric, kind in kinds.items():
            shares = {"share": float(rng.random() < 0.7), "grade": rng.random()}
            value = {**shares, "error": min(3.0, rng.expovariate(2)), "marks": rng.uniform(1, 10)}[kind]
            chance = {"arc": 0.25, "search": len(metric) / 100}.get(task, 0.0)  # that of a ranking differs
            more = {"higher_is_better": kind != "error", "chance": chance, **answer}
            rows.append(DocumentScore(leaf, metric, 7 * doc, *hashes, value, **more))
    return rows


def random_release(root: Path, seed: int) -> Path:
    """Publish a release with random results of four models, one of which has a broken likelihood."""
    rng = random.Random(seed)
    tasks = rng.sample(sorted(TASKS), rng.randint(1, len(TASKS)) if seed else len(TASKS))
    scores = {}
    for model in ("general", "local_one", "champion", "merge"):
        parts = [random_scores(rng, task, task, TASKS[task]) for task in tasks]
        if seed % 2:
            leaves = [random_scores(rng, "suite", leaf, kinds) for leaf, kinds in GROUP.items()]
            parts.append([row for rows in leaves for row in rows])
        scores[model] = [
            part(root / f"{model}-{number}-{half}", rows)
            for number, whole in enumerate(parts)
            for half, rows in enumerate((whole[: len(whole) // 6 * 3], whole[len(whole) // 6 * 3 :]))
        ]
        for artifact in scores[model][-2:] if seed % 2 else ():
            table = tuple(score.model_copy(update={"task": "suite"}) for score in artifact.value.tasks)
            object.__setattr__(artifact, "value", artifact.value.model_copy(update={"tasks": table}))
    likelihoods = {"general": read(root / "a", PARENT), "merge": read(root / "merge", worse(0.01))}
    ranges = {"essay": (1.0, 10.0), "speech": (0.0, 3.0)}
    guards = tuple(
        Guard(task=task, guarded_by="general", score_range=ranges.get(task, (0.0, 1.0)), advisory=True)
        for task in tasks
    )
    plan = GatePlan(GateRule(on_inconclusive="pass"), parents=("general", "local_one"))
    inputs = GateInputs(guards, scores, likelihoods, DriftLimits(), plan)
    record = verdict_record(inputs, gate.work(*inputs), ())
    (root / "evidence").mkdir()
    summary = record_evidence.work(root / "evidence", record, scores, likelihoods)
    names = ("evidence/gate.json", "evidence/outcomes.parquet", "evidence/likelihoods.parquet")
    contents = {name.replace(".", "__"): (root / "evidence" / name).read_bytes() for name in names}
    parts = publishable(root / "sample").parts._replace(
        evidence=stored("evidence", root / "stored", summary, **contents)
    )
    return write_release(parts, root)


def export(release: Path, out: Path, organization: str | None = None, export_time: datetime = NOW) -> None:
    """Write the export of a release."""
    opened = find_release(str(release))
    verified = check_release(opened)
    results = read_release_results(opened, verified.listing, verified.statement, organization)
    for name, content in inspect_logs(results, export_time):
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert not path.exists()
        path.write_bytes(content)


def checked(outs: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """Return what the real library reads from the logs in each directory."""
    done = subprocess.run([VALIDATORS, "-c", CHECK, *map(str, outs)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Return a function of a seed that returns a release and the directory of its export."""

    @cache
    def exported_release(seed: int) -> tuple[Path, Path]:
        root = tmp_path_factory.mktemp(f"exchange-{seed}")
        release, out = random_release(root, seed), root / "out"
        export(release, out)
        return release, out

    return exported_release


@pytest.fixture(params=sampled(SEEDS, [1]))
def exported(request: pytest.FixtureRequest, exports: Exports) -> tuple[Path, Path]:
    return exports(request.param)


@needs_validators
@pytest.mark.proof
def test_the_real_library_reads_every_score_bit_for_bit(exports: Exports) -> None:
    exported = list(map(exports, SEEDS))
    found = checked([out for _, out in exported])
    for (release, _), contents in zip(exported, found, strict=True):
        require_equal_scores(release, contents)


@pytest.mark.story
def test_a_gate_reads_the_evidence_of_the_release_from_its_logs(exported: tuple[Path, Path]) -> None:
    release, out = exported
    hashes = ["doc_hash", "prompt_hash", "target_hash"]
    read_by_gate = ["metric", "doc_id", *hashes, "outcome", "higher_is_better", "chance"]
    expected: dict[tuple[str, str], set[tuple[Any, ...]]] = defaultdict(set)
    for row in pq.read_table(release / OUTCOMES).to_pylist():
        expected[row["model"], row["task"]].add(tuple(row[name] for name in read_by_gate))
    found = {}
    for path in out.rglob("*.json"):
        spec = json.loads(path.read_text())["eval"]
        if (task := spec["task"]) != "perplexity":
            rows = read_task(find_results(path), task).outcomes
            values = {tuple(getattr(row, name) for name in read_by_gate) for row in rows}
            found[spec["metadata"]["mergegate"]["model"], task] = values
    assert found == expected


def require_equal_scores(release: Path, found: list[dict[str, Any]]) -> None:
    values: Any = defaultdict(lambda: defaultdict(dict))
    chances: Any = defaultdict(dict)
    by_document = {}
    for row in pq.read_table(release / OUTCOMES).to_pylist():
        document = (row["model"], row["task"], row["doc_id"])
        values[document[:2]][row["doc_id"]][row["metric"]] = row["outcome"]
        chances[document][row["metric"]] = row["chance"]
        by_document[document] = row
    logs = {(log["model"], log["task"]): log for log in found}
    assert logs.keys() == {*values, ("general", "perplexity"), ("merge", "perplexity")}
    assert len({log["id"] for log in found}) == len(found)
    assert {log["created"] for log in found} == {"2031-05-06T07:08:09+00:00"}
    for (model, task), documents in values.items():
        log = logs[model, task]
        assert {sample["id"]: sample["scores"] for sample in log["samples"]} == documents
        for sample in log["samples"]:
            row = by_document[model, task, sample["id"]]
            for name in ("doc_hash", "prompt_hash", "target_hash"):
                assert sample["metadata"][name] == row[name]
            assert sample["chances"] == chances[model, task, sample["id"]]
            ends = {"stop": "stop", "eos": "stop", "length": "max_tokens", "context": "model_length"}
            assert sample["stops"] == [ends[end] for end in row["ended"]]
        for metric, stated in log["stated"].items():
            scores = [each[metric] for each in documents.values()]
            assert stated["mean"] == pytest.approx(statistics.fmean(scores), rel=1e-12)
            assert stated["stderr"] == pytest.approx(statistics.stdev(scores) / math.sqrt(len(scores)), rel=1e-12)
    for log in found:
        for metric, stated in log["stated"].items():
            assert log["recomputed"][metric] == pytest.approx(stated, rel=1e-12)


def test_an_export_identifies_models_and_contains_no_path_and_no_answer(exported: tuple[Path, Path]) -> None:
    release, out = exported
    texts = {path: path.read_text() for path in out.rglob("*.json")}
    assert not [path for path, text in texts.items() if "secret" in text or str(release.parents[1]) in text]
    models = {}
    for text in texts.values():
        spec = json.loads(text)["eval"]
        about = spec["metadata"]["mergegate"]
        models[about["model"]] = (spec["model"].removeprefix("hf/"), about["role"])
        if about["model"] == "general":
            assert (about["identity"], spec["model_args"]) == (COMMIT, {"revision": COMMIT})
    assert models == {
        "general": ("acme/general", "base"),
        "local_one": ("local/local_one", "parent"),
        "champion": ("local/champion", "earlier release"),
        "merge": ("local/demo", "release"),
    }


def test_a_later_export_differs_in_its_time_only(exports: Exports, tmp_path: Path) -> None:
    release, out = exports(1)
    later = datetime(2032, 1, 1, tzinfo=UTC)
    export(release, tmp_path, export_time=later)
    first, second = (
        {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.json")} for root in (out, tmp_path)
    )
    assert first.keys().isdisjoint(second)
    assert second == {
        name.replace("2031-05-06T07-08-09", "2032-01-01T00-00-00"): text.replace(NOW.isoformat(), later.isoformat())
        for name, text in first.items()
    }


@dataclass(frozen=True)
class Altered:
    """A release in which files have another content."""

    release: PublishedRelease
    contents: Mapping[str, bytes]
    reference: str = "demo"
    version: str | None = None

    def files(self) -> Mapping[str, tuple[int, str]]:
        return self.release.files()

    def read(self, name: str) -> bytes:
        return self.contents.get(name) or self.release.read(name)

    def download(self) -> Path:
        raise NotImplementedError


@pytest.fixture(scope="module")
def verified(exports: Exports) -> tuple[PublishedRelease, VerifiedRelease]:
    release = find_release(str(exports(1)[0]))
    return release, check_release(release)


def test_a_release_without_results_or_with_damaged_results_is_refused(
    verified: tuple[PublishedRelease, VerifiedRelease],
) -> None:
    release, check = verified
    with pytest.raises(InvalidInput, match="no results to export"):
        read_release_results(release, {}, check.statement, None)
    record = json.loads(release.read("evidence/gate.json"))
    for name, content in (
        ("evidence/gate.json", b"{}"),
        ("evidence/gate.json", json.dumps(record | {"inputs": {}}).encode()),
        ("evidence/gate.json", json.dumps(record | {"inputs": record["inputs"] | {"scores": {}}}).encode()),
        (OUTCOMES, release.read(OUTCOMES)[:-100]),
        (OUTCOMES, b"PAR1"),
        ("bom.json", b"[]"),
    ):
        with pytest.raises(Refused, match="cannot be read"):
            read_release_results(Altered(release, {name: content}), check.listing, check.statement, None)


@pytest.mark.parametrize(("forms", "library"), [(["retrieval"], "mergegate"), (None, "lm_eval")])
def test_publisher_and_library_are_those_of_the_run(
    verified: tuple[PublishedRelease, VerifiedRelease], forms: list[str] | None, library: str
) -> None:
    release, checked_release = verified
    statement = json.loads(json.dumps(checked_release.statement))
    statement["predicate"]["mergegate_evaluation"]["task_forms"] = forms
    bom = json.loads(release.read("bom.json"))
    if forms is None:  # as in releases of earlier versions, which name the parents in the bill of materials
        references = statement["predicate"].pop("mergegate_evaluation")["models"]
        for ancestor in bom["metadata"]["component"]["pedigree"]["ancestors"]:
            (name,) = (name for name, reference in references.items() if reference == ancestor["name"])
            ancestor["bom-ref"] = f"parent:{name}"
    opened = Altered(release, {"bom.json": json.dumps(bom).encode()})
    results = read_release_results(opened, checked_release.listing, statement, "Acme Labs: München")
    specs = [json.loads(data)["eval"] for _, data in inspect_logs(results, NOW)]
    assert {spec["metadata"]["library"] for spec in specs if spec["task"] != "perplexity"} == {library}
    models = {spec["model"].removeprefix("hf/") for spec in specs}
    assert models >= {"acme/general", "Acme-Labs-M-nchen/demo"}
