"""Record the inputs of the gate's verdict, and decide again from the record alone: stage ``evidence``.

Every release carries the record, so that anyone can recompute its verdict without a model::

    evidence/gate.json            the verdict, and all inputs of the stage ``gate`` that are not in a table
    evidence/outcomes.parquet     a row per model, document and metric: ``DocumentScore``, ``model`` and ``part``
    evidence/likelihoods.parquet  a row per model and document: ``DocumentLikelihood`` and ``model``

The tables contain no texts. Documents, prompts and targets are hashes. Clusters and answers are numbers that only tell
which ones are equal.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mergegate.merge_core.errors import Refused
from mergegate.tasks.base.stage import Outcome, StageValue, Verdict, combine_verdicts, stage, versions
from mergegate.tasks.base.store import Artifact, canonical
from mergegate.tasks.quality.evaluation import (
    SCORES_FILE,
    Scores,
    join_parts,
    read_document_scores,
    write_document_scores,
)
from mergegate.tasks.quality.gate.stage import GateInputs, gate
from mergegate.tasks.quality.gate.verdicts import GateVerdict
from mergegate.tasks.quality.perplexity import (
    LIKELIHOODS_FILE,
    Likelihoods,
    read_documents,
    sum_documents,
    write_documents,
)

EVIDENCE_RECORD = "evidence/gate.json"  # names in a release
OUTCOMES, LIKELIHOODS = "evidence/outcomes.parquet", "evidence/likelihoods.parquet"
EVIDENCE_TABLES = (OUTCOMES, LIKELIHOODS)
_TABLES = ("scores", "likelihoods")  # inputs of the gate that are in tables
_SENTENCES = frozenset(("reason", "reasons", "notes"))  # fields of a verdict
_MAX_ROWS = 20_000_000  # A larger table in a release is not read.
_DICTIONARY_BYTES = 64 << 20  # A hash is stored once, however many models have scores of its document.


class FurtherVerdict(BaseModel):
    """Verdict of a stage after the gate. It depends on a judge or a server, so it cannot be recomputed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # Name of the stage, such as 'judge'.
    outcome: Outcome
    publishable: bool
    reasons: tuple[str, ...]


class VerdictRecord(BaseModel):
    """Content of ``evidence/gate.json``. All values are plain JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    gate_version: int = Field(description="Version of the stage that decided.")
    versions: dict[str, str] = Field(description="Versions of mergegate and of the libraries that compute the verdict.")
    inputs: dict[str, Any] = Field(description="Arguments of the stage by name. A table replaces scores by document.")
    verdict: dict[str, Any] = Field(description="Verdict of the gate.")
    further_verdicts: tuple[FurtherVerdict, ...] = Field(description="Verdicts of later stages, in order.")
    further_likelihoods: dict[str, Any] = Field(
        default_factory=dict,
        exclude_if=lambda models: not models,
        description="Likelihoods of models that the gate does not compare, by model.",
    )


class RecordedEvidence(StageValue):
    """Size of the evidence that an artifact of the stage ``evidence`` holds."""

    outcomes: int  # Rows of the tables.
    likelihoods: int
    models: int

    def summary(self) -> str:
        counts = (self.outcomes, "outcomes"), (self.likelihoods, "likelihoods")
        rows = " and ".join(f"{count:,} {noun}" for count, noun in counts if count) or "no documents"
        return f"{rows} of {self.models} models"


class VerdictDifference(NamedTuple):
    """Value in a stored verdict that the evidence does not lead to."""

    subject: str  # 'gsm8k against base: drop'
    stored: Any
    recomputed: Any

    @property
    def is_rounding(self) -> bool:
        """Whether the two are numbers that agree to nine digits."""
        pair = (self.stored, self.recomputed)
        return all(type(value) is float for value in pair) and math.isclose(*pair, rel_tol=1e-9, abs_tol=1e-12)

    def __str__(self) -> str:
        pair = (self.stored, self.recomputed)
        old, new = (f"{value:.6g}" if type(value) is float else repr(value) for value in pair)
        if old == new:
            old, new = map(repr, pair)
        if any(isinstance(value, list | dict) for value in pair):
            old, new = (f"{len(value)} entries" if isinstance(value, list | dict) else "none" for value in pair)
        return f"{self.subject}: stored {old}, recomputed {new}"


def verdict_record(
    inputs: GateInputs,
    verdict: GateVerdict,
    further_verdicts: Sequence[Verdict],
    further_likelihoods: Mapping[str, Artifact[Likelihoods]] = MappingProxyType({}),
) -> VerdictRecord:
    """Return the record of a verdict of the gate, apart from the tables.

    The inputs have the fields that are in the key of the stage, so they contain neither durations nor prompt settings.
    """
    types = get_type_hints(GateInputs)
    stored: dict[str, Any] = {
        name: TypeAdapter(types[name]).dump_python(value, mode="json")
        for name, value in inputs._asdict().items()
        if name not in (*_TABLES, "guards")
    }
    # In contrast to ``canonical``, this keeps the order of a guard's metrics, in which their patterns apply.
    stored["guards"] = [
        guard.model_dump(mode="json", include=set(cast(dict[str, object], guard.content_key())))
        for guard in inputs.guards
    ]
    stored["scores"] = {model: [canonical(part.value) for part in parts] for model, parts in inputs.scores.items()}
    stored["likelihoods"] = {model: canonical(artifact.value) for model, artifact in inputs.likelihoods.items()}
    return VerdictRecord(
        gate_version=gate.version,
        versions=versions_here(),
        inputs=stored,
        verdict=plain_verdict(verdict),
        further_verdicts=tuple(
            FurtherVerdict(**each.model_dump(include=set(FurtherVerdict.model_fields))) for each in further_verdicts
        ),
        further_likelihoods={model: canonical(artifact.value) for model, artifact in further_likelihoods.items()},
    )


@cache
def versions_here() -> dict[str, str]:
    """Return the versions of everything that can affect the digits of a verdict, and of mergegate."""
    libraries = versions("mergegate", "numpy", "scipy")
    return libraries | {"python": platform.python_version(), "machine": platform.machine()}


def plain_verdict(verdict: GateVerdict) -> dict[str, Any]:
    """Return a verdict as the JSON that a release contains."""
    return cast(dict[str, Any], json.loads(json.dumps(verdict.model_dump(mode="json"), allow_nan=False)))


@stage("evidence", version=2)
def record_evidence(
    out: Path,
    record: VerdictRecord,
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    likelihoods: Mapping[str, Artifact[Likelihoods]],
) -> RecordedEvidence:
    """Write the record and its tables to ``out``, and check that the verdict follows from them.

    ``scores`` and ``likelihoods`` are those of all models in ``record``, by name.

    Raises:
        Refused: The verdict does not follow from the written files.
    """
    (out / EVIDENCE_RECORD).parent.mkdir()
    # Not sorted: the order of a guard's metrics matters.
    text = json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
    (out / EVIDENCE_RECORD).write_bytes(f"{text}\n".encode())
    outcomes = _write_outcomes(out / OUTCOMES, scores)
    rows = {model: read_documents(artifact.directory) for model, artifact in likelihoods.items()}
    if rows:
        write_documents(out / LIKELIHOODS, [row for documents in rows.values() for row in documents])
        _add_columns(out / LIKELIHOODS, model=[model for model, documents in rows.items() for _ in documents])
    tables = {name: out / name for name in EVIDENCE_TABLES if (out / name).is_file()}
    if differences := compare_verdicts(record.verdict, plain_verdict(decide_again(record, tables))):
        raise Refused(
            "evidence",
            found="a stored verdict that does not follow from the outcomes: " + "; ".join(map(str, differences[:3])),
            expected="the verdict that the gate decides from them now",
            remedy="delete the directory 'gate' of the store and run again, so that the gate decides it again",
        )
    return RecordedEvidence(
        outcomes=outcomes,
        likelihoods=sum(map(len, rows.values())),
        models=len({*scores, *likelihoods}),
    )


def _write_outcomes(path: Path, scores: Mapping[str, Sequence[Artifact[Scores]]]) -> int:
    """Write all scores as one table without texts, and return its number of rows."""
    numbers: dict[tuple[str, ...], dict[str, str]] = {}

    def number(text: str, *scope: str) -> str:
        known = numbers.setdefault(scope, {"": ""})
        return known.setdefault(text, str(len(known)))

    rows, models, parts = [], [], []
    for model, artifacts in scores.items():
        for part, artifact in enumerate(artifacts):
            for row in read_document_scores(artifact.directory / SCORES_FILE):
                answer = number(row.answer, "answer", row.task, str(row.doc_id))
                rows.append(row._replace(cluster=number(row.cluster, "cluster"), answer=answer))
                models.append(model)
                parts.append(part)
    if rows:
        write_document_scores(path, rows)
        _add_columns(path, part=parts, model=models)
    return len(rows)


def _add_columns(path: Path, **columns: Sequence[object]) -> None:
    """Put further columns in front of those of a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        table = file.read()
    for name, values in columns.items():
        table = table.add_column(0, name, pa.array(values))
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=_DICTIONARY_BYTES)


def decide_again(record: VerdictRecord, tables: Mapping[str, Path | bytes]) -> GateVerdict:
    """Return the verdict that the stage ``gate`` decides from recorded inputs.

    ``tables`` holds the path or the content of ``OUTCOMES`` and ``LIKELIHOODS``. A table without rows is absent.

    Raises:
        ValueError: The record or a table does not have the form that ``record_evidence`` writes.
        InvalidInput: The gate rejects the inputs, for example because a document is missing.
    """
    types = get_type_hints(GateInputs)
    inputs = {
        name: TypeAdapter(types[name]).validate_python(value)
        for name, value in record.inputs.items()
        if name not in _TABLES
    }
    with TemporaryDirectory(prefix="mergegate-evidence-") as scratch:
        scores, likelihoods = read_measurements(record, tables, Path(scratch))
        compared = {model: likelihoods[model] for model in record.inputs["likelihoods"]}
        return gate.work(*GateInputs(scores=scores, likelihoods=compared, **inputs))


def read_measurements(
    record: VerdictRecord, tables: Mapping[str, Path | bytes], scratch: Path
) -> tuple[dict[str, list[Artifact[Scores]]], dict[str, Artifact[Likelihoods]]]:
    """Return scores and likelihoods by model, with artifacts in ``scratch`` as the stages wrote them.

    The artifacts contain no texts. ``tables`` is as in ``decide_again``.
    """
    outcomes, documents = _Table(OUTCOMES, tables, scratch), _Table(LIKELIHOODS, tables, scratch)
    scores = {
        model: [
            Artifact("evaluate", "", "", Scores(model=model, **value), outcomes.write(SCORES_FILE, model, part), {})
            for part, value in enumerate(parts)
        ]
        for model, parts in record.inputs["scores"].items()
    }
    likelihoods = {
        model: Artifact(
            "perplexity", "", "", Likelihoods(model=model, **value), documents.write(LIKELIHOODS_FILE, model), {}
        )
        for model, value in (record.inputs["likelihoods"] | record.further_likelihoods).items()
    }
    outcomes.require_complete()
    documents.require_complete()
    return scores, likelihoods


def measured_values(record: VerdictRecord, tables: Mapping[str, Path | bytes]) -> dict[str, dict[str, Any]]:
    """Return the scores and likelihoods of each model as plain JSON, computed from its documents.

    The arguments and errors are those of ``decide_again``.
    """
    with TemporaryDirectory(prefix="mergegate-evidence-") as scratch:
        scores, likelihoods = read_measurements(record, tables, Path(scratch))
        values = {model: {"scores": canonical(join_parts(parts))} for model, parts in scores.items() if parts}
        for model, artifact in likelihoods.items():
            values.setdefault(model, {})["likelihoods"] = canonical(sum_documents(artifact))
    return values


class _Table:
    """Table of a release, divided into the files that the gate reads."""

    def __init__(self, name: str, tables: Mapping[str, Path | bytes], scratch: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.name, self._scratch, self._written_rows = name, scratch, 0
        self._table = pa.table({"model": pa.array([], pa.string()), "part": pa.array([], pa.int64())})
        if name in tables:
            source = tables[name]
            with pq.ParquetFile(pa.BufferReader(source) if isinstance(source, bytes) else source) as file:
                if file.metadata.num_rows > _MAX_ROWS:
                    raise ValueError(f"{name}: {file.metadata.num_rows:,} rows, more than {_MAX_ROWS:,}")
                self._table = file.read()

    def write(self, file_name: str, model: str, part: int | None = None) -> Path:
        """Write the rows of a model, or of one part, to a new directory, which is returned."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        rows = self._table.filter(pc.equal(self._table["model"], model))
        if part is not None:
            rows = rows.filter(pc.equal(rows["part"], part))
        self._written_rows += len(rows)
        directory = Path(mkdtemp(dir=self._scratch))
        pq.write_table(rows, directory / file_name)
        return directory

    def require_complete(self) -> None:
        """Raise ValueError if a row belongs to no model of the record."""
        if self._written_rows != len(self._table):
            raise ValueError(f"{self.name}: rows of a model that gate.json does not name")


def joint_verdict(record: VerdictRecord, verdict: GateVerdict) -> GateVerdict:
    """Return the gate's verdict with the joint outcome and reasons of all stages, as a release states it."""
    own = verdict.as_verdict()
    further = [own.model_copy(update=each.model_dump()) for each in record.further_verdicts]
    return verdict.model_copy(update=combine_verdicts((own, *further))._asdict())


def compare_verdicts(
    stored_verdict: Mapping[str, Any], new_verdict: Mapping[str, Any]
) -> tuple[VerdictDifference, ...]:
    """Return all values of two verdicts in plain JSON that are not exactly equal, the most important ones first.

    Guards come first, then the mean and the perplexity. Of each, numbers come before sentences. Sentences are equal if
    they state the same numbers, because their words depend on the version of mergegate.
    """

    def rank(difference: tuple[tuple[Any, ...], Any, Any]) -> tuple[int, int, int]:
        path = difference[0]
        is_listed = len(path) > 1 and isinstance(path[1], int)
        sections, values = ("guards", "suites", "drift"), ("outcome", "drop", "ratio", "low", "high")
        return (
            sections.index(path[0]) if path[0] in sections else len(sections),
            path[1] if is_listed else 0,
            values.index(path[-1]) if path[-1] in values else len(values) + (path[-1] == "reason"),
        )

    differences = sorted(_differences((), stored_verdict, new_verdict), key=rank)
    return tuple(VerdictDifference(_subject(path, new_verdict), old, new) for path, old, new in differences)


def _differences(path: tuple[Any, ...], old: Any, new: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**new, **old}:
            if name in _SENTENCES and _numbers(old.get(name)) == _numbers(new.get(name)):
                continue
            yield from _differences((*path, name), old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences((*path, at), *pair)
    elif old != new or type(old) is not type(new):
        yield path, old, new


def _numbers(sentences: object) -> tuple[bool, list[str]]:
    """Return whether there are sentences, and the numbers in them in ascending order."""
    text = json.dumps(sentences, ensure_ascii=False)
    return bool(sentences), sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def _subject(path: tuple[Any, ...], verdict: Mapping[str, Any]) -> str:
    """Return the name of a value for users, such as ``gsm8k against base: drop``."""
    section, *rest = path
    if section == "guards" and rest:
        guard = verdict["guards"][rest[0]]
        section, rest = f"{guard['task']} against {guard['reference']}", rest[1:]
    elif section == "suites" and rest:
        section, rest = f"mean against {verdict['suites'][rest[0]]['reference']}", rest[1:]
    elif section == "drift":
        section = "perplexity"
    return ": ".join([str(section), *([".".join(map(str, rest))] if rest else [])])
