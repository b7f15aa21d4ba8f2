"""Build the parts of a small release as a run would: report content, parents and licenses."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from builders.results import build, sha, task_score
from gguf_samples import METADATA, gguf

from mergegate.merge_core import load_recipe
from mergegate.tasks.base.store import Artifact, digest
from mergegate.tasks.merge import MergeSummary, Numerics
from mergegate.tasks.models.checkpoints.pin import PinnedCheckpoint, PinnedRecipe
from mergegate.tasks.preflight.licenses.check import Ancestor, LicenseVerdict
from mergegate.tasks.preflight.licenses.combination import combine_licenses
from mergegate.tasks.preflight.licenses.rules import LicensedParent
from mergegate.tasks.preflight.licenses.table import load_table
from mergegate.tasks.preflight.settings import Use
from mergegate.tasks.quality.evaluation.document_order import DataSource, TaskData
from mergegate.tasks.quality.evaluation.scoring.scores import Scores, TaskScore
from mergegate.tasks.quality.evaluation.settings import Scoring
from mergegate.tasks.quality.gate.evidence import GatePlan
from mergegate.tasks.quality.gate.settings import GateRule
from mergegate.tasks.quality.gate.stage import GateInputs
from mergegate.tasks.quality.gate.verdict_record import (
    EVIDENCE_RECORD,
    RecordedEvidence,
    record_evidence,
    verdict_record,
)
from mergegate.tasks.quality.gate.verdicts import GateVerdict
from mergegate.tasks.quality.serve import Check
from mergegate.tasks.quality.variants import VariantRecord, VariantVerdict
from mergegate.tasks.quality.variants.gguf import GgufFormat
from mergegate.tasks.release.publish import PassedVariant, ReleaseParts, VariantParts, publish, variant_content
from mergegate.tasks.release.publish.content import (
    FACTS,
    SUMS,
    ReleaseFile,
    checksums_text,
    content_version,
    written_file,
)
from mergegate.tasks.release.publish.documents.card_metadata import BENCHMARKS
from mergegate.tasks.release.publish.documents.facts import DocumentFacts, MergeRelease, read_facts
from mergegate.tasks.release.publish.targets.contract import PublishTarget, Release
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget
from mergegate.tasks.release.publish.targets.hub import HubTarget
from mergegate.tasks.release.report.content import Library, ReportContent, ReportedModel
from mergegate.tasks.release.report.stage import Report

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECIPE = """\
merge_method: linear
models:
  - model: acme/general@main
    parameters: {weight: 0.5}
  - model: ../models/local_one
    parameters: {weight: 0.5}
dtype: bfloat16
"""
NUMERICS = Numerics(seed=3, device="cpu", where="cpu", versions={"torch": "2.13.0", "numba": "0.68.1"})


def share(task: str, right: int, n: int, metric: str = "acc,none") -> TaskScore:
    """Return the score for `right` correct answers of `n`, computed as the evaluation does."""
    p = right / n
    return task_score(task, p, n, metric=metric, stderr=math.sqrt(p * (1 - p) / (n - 1)))


def parents(root: Path) -> tuple[PinnedCheckpoint, ...]:
    """Return two parents: one on the Hub and one in a local directory."""
    hub, local = {"ref": "acme/general@main", "revision": COMMIT, "is_base": True}, {"ref": "../models/local_one"}
    for name in ("general", "local_one"):
        (root / name).mkdir(parents=True, exist_ok=True)
    return (
        PinnedCheckpoint(name="general", digest=sha("general"), directory=root / "general", **hub),
        PinnedCheckpoint(name="local_one", digest=sha("local"), directory=root / "local_one", revision=None, **local),
    )


def content(scores: Sequence[TaskScore] = (), name: str = "demo", scoring: Scoring | None = None) -> ReportContent:
    own = {score.task: BENCHMARKS[score.task].dataset for score in scores if score.task in BENCHMARKS}
    data = {task: TaskData(digest=sha(task), sources=(DataSource(path=own[task], revision=COMMIT),)) for task in own}
    measured = build(Scores, tasks=tuple(scores), data=data) if scores else None
    hub = {"role": "base", "ref": "acme/general@main", "revision": COMMIT, "digest": sha("general")}
    local = {"ref": "../models/local_one", "digest": sha("local"), "licence": "mit"}
    versions = {"mergegate": "0.1.0", "transformers": "5.23.0"}
    return build(
        ReportContent, name=name, method="linear of 2", recipe=RECIPE,
        models=(
            build(ReportedModel, name="general", scores=measured, **hub),
            build(ReportedModel, name="local_one", scores=measured, **local),
            build(ReportedModel, name="merge", role="merge", ref=name, digest=sha("merge"), scores=measured),
        ),
        verdict=build(GateVerdict), scoring=scoring or Scoring(seed=11),
        versions=tuple(Library(name=library, version=version) for library, version in versions.items()),
        reproduce=("mergegate merge recipe.yaml OUT --seed 3",),
    )  # fmt: skip


def license_verdict(
    *ids: str,
    name: str = "acme/demo",
    accepted: dict[str, str] | None = None,
    ancestors: tuple[Ancestor, ...] = (),
    unread: dict[str, str] | None = None,
) -> LicenseVerdict:
    """Return the verdict for models under these licenses, by mergegate's own license table."""
    shipped = load_table()
    models = [LicensedParent(name=f"acme/{key}", license=shipped.lookup(key)) for key in ids]
    use = Use(purpose="research", visibility="public", commercial_entity=False, name=name)
    combination = combine_licenses(models, use, shipped, accepted or {})
    licenses = {model.name: model.license.id for model in models}
    return LicenseVerdict(combination=combination, licenses=licenses, ancestors=ancestors, unread=unread or {})


# The library has its own environment, because its format checkers slow down every import of Prefect by seconds.
VALIDATORS = Path(__file__).resolve().parents[2] / ".venv-validators" / "bin" / "python"
needs_validators = pytest.mark.skipif(
    not VALIDATORS.exists() and "MERGEGATE_REQUIRE_VALIDATORS" not in os.environ,
    reason="make .venv-validators/ready first",
)


def validator_answers(script: str, documents: Sequence[str]) -> list[str | None]:
    """Run a script in the environment of the validators. It reads a JSON list of documents and writes their errors."""
    done = subprocess.run([VALIDATORS, "-c", script], input=json.dumps(documents), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cyclonedx_finds(documents: Sequence[str]) -> list[str | None]:
    """Return the error of the CycloneDX library on reading and writing each bill of materials, or None."""
    script = """
import json, sys
from cyclonedx.model.bom import Bom
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
validate = JsonStrictValidator(SchemaVersion.V1_6).validate_str

def error_of(text):
    try:
        error = validate(text) or validate(JsonV1Dot6(Bom.from_json(json.loads(text))).output_as_string())
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return error and str(error)

json.dump([error_of(text) for text in json.load(sys.stdin)], sys.stdout)
"""
    return validator_answers(script, documents)


def files() -> tuple[ReleaseFile, ...]:
    return (written_file("model.safetensors", "weights"), written_file("licenses/mit.txt", "terms"))


def stored(stage: str, directory: Path, value: Any, **contents: bytes) -> Artifact[Any]:
    """Return an artifact with these files as the store would. ``__`` in a name stands for a dot."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {name.replace("__", "."): data for name, data in contents.items()}
    for name, data in names.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in names.items()}
    return Artifact(stage, sha(f"key of {stage}"), digest(sums), value, directory, sums)


@dataclass(frozen=True)
class Publishable:
    """Inputs of the publish step except the target: a merge that passed, with its licenses and its report."""

    content: ReportContent
    pinned: PinnedRecipe
    numerics: Numerics
    license: Artifact[LicenseVerdict]
    merged: Artifact[MergeSummary]
    report: Artifact[Report]
    evidence: Artifact[RecordedEvidence]

    def publish(self, target: PublishTarget, root: Path, expected_head: str | None = None) -> Release:
        """Run the publish step as the flow does."""
        return publish(target, root, self.parts, expected_head=expected_head)

    @property
    def parts(self) -> ReleaseParts:
        inputs = (self.content, self.pinned, self.numerics, self.license)
        return ReleaseParts(*inputs, self.merged, self.evidence)


def publishable(root: Path, weights: bytes = b"weights", **files: bytes) -> Publishable:
    """Return a small unpublished release. Different weights give a different release.

    ``files`` are those of the checkpoint except weights, by name. The default is an empty configuration.
    """
    sizes = {"tensors": 1, "parameters": 7, "bytes_written": len(weights), "seconds": 1.0}
    merge = MergeSummary(method="linear", warnings=(), weights={}, **sizes)
    return Publishable(
        content(),
        PinnedRecipe(load_recipe(RECIPE), parents(root / "parents")),
        NUMERICS,
        stored("licenses", root / "licenses", license_verdict("apache-2.0", "mit")),
        stored("merge", root / "merge", merge, model__safetensors=weights, **(files or {"config.json": b"{}"})),
        stored("report", root / "report", Report(headline="passed"), report__html=b"<html>", report__json=b"{}"),
        evidence(root / "evidence"),
    )


def facts_of(root: Path, inputs: Mapping[str, Any] | None = None, **update: Any) -> DocumentFacts:
    """Return the facts of a release on the Hub. ``inputs`` replace those of the merge, and ``update`` the facts."""
    files = publishable(root).parts.files(HubTarget(to="hub", repo="acme/demo"))
    facts = read_facts(next(file.read() for file in files if file.name == FACTS))
    return facts.model_copy(update={"origin": replace(facts.origin, **(inputs or {})), **update})


def write_release(parts: ReleaseParts, root: Path) -> Path:
    """Write the files of a release as a directory target does, and return its directory."""
    files = parts.files(DirectoryTarget(path=root))
    files.append(written_file(SUMS, checksums_text({file.name: file.sha256 for file in files})))
    release = root / content_version(files)
    for file in files:
        (release / file.name).parent.mkdir(parents=True, exist_ok=True)
        (release / file.name).write_bytes(file.read())
    return release


def evidence(directory: Path) -> Artifact[RecordedEvidence]:
    """Return the evidence of a verdict without guards."""
    inputs = GateInputs((), {}, {}, None, GatePlan(GateRule()))
    with TemporaryDirectory() as scratch:
        recorded = record_evidence.work(Path(scratch), verdict_record(inputs, content().verdict, ()), {}, {})
        record = {EVIDENCE_RECORD.replace(".", "__"): Path(scratch, EVIDENCE_RECORD).read_bytes()}
    return stored("evidence", directory, recorded, **record)


class SampleGguf(GgufFormat):
    """GGUF files that no llama.cpp wrote."""

    def release_files(self, name: str, artifact: Artifact[VariantRecord]) -> Mapping[str, Path]:
        return {f"{name}-{artifact.value.type}.gguf": artifact.directory / "variant.gguf"}


def variant_parts(
    root: Path, merge: MergeRelease, *types: str, failed: Sequence[str] = (), **contents: bytes
) -> VariantParts:
    """Return the parts of a release of variants of ``merge``: those in ``failed`` did not pass."""
    of_merge = publishable(root / "merge")
    verdicts, passed = [], []
    for name in types:
        data = contents.get(name) or gguf({**METADATA, "general.name": ("s", name)})
        built = {"bytes": len(data), "tensor_types": {name: 24, "F32": 5}, "versions": {"llama-cpp-python": "0.3.36"}}
        record = build(VariantRecord, type=name, **built)
        reasons = {"outcome": "fail", "publishable": False, "reasons": ("copying lost 5.0 points against merge",)}
        verdicts.append(
            build(
                VariantVerdict, type=name, backend="llama_cpp", record=record,
                checks=(Check.passed_check("chat template", f"read from {root}", "that of the merge"),),
                gate=of_merge.content.verdict, digest=sha(name), **(reasons if name in failed else {}),
            )
        )  # fmt: skip
        if name not in failed:
            weights = stored("variant", root / name, record, variant__gguf=data)
            passed.append(PassedVariant(name, weights, evidence(root / f"evidence of {name}")))
    about = variant_content(of_merge.content, f"{merge.name}-GGUF", merge, verdicts)
    settings = SampleGguf(format="gguf", types=types, python=root / "bin" / "python")
    return VariantParts(about, settings, tuple(passed), merge, of_merge.pinned, of_merge.license)
