"""Recompute the verdict of a release from its own files, and compare it with the verdict that the release states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.base.store import canonical
from mergegate.tasks.quality.gate import (
    EVIDENCE_RECORD,
    EVIDENCE_TABLES,
    FurtherVerdict,
    GateVerdict,
    VerdictDifference,
    VerdictRecord,
    compare_verdicts,
    decide_again,
    gate,
    joint_verdict,
    measured_values,
    plain_verdict,
    versions_here,
)
from mergegate.tasks.quality.variants import VariantVerdict
from mergegate.tasks.release.publish.content import (
    DOCUMENTS,
    EVAL_RESULTS,
    FACTS,
    KEYLESS_SIGNATURE,
    SIGNATURE,
    SUMS,
    VARIANT_VERDICTS,
    ReleaseFile,
    read_document,
    sha256_of,
    variant_evidence,
)
from mergegate.tasks.release.publish.documents.facts import DocumentFacts, read_facts
from mergegate.tasks.release.publish.documents.license_files import shipped_files
from mergegate.tasks.release.publish.documents.release_parts import release_documents
from mergegate.tasks.release.publish.targets import PublishedRelease
from mergegate.tasks.release.report import ReportedModel

_SHOWN = 8  # differences that a message lists


@dataclass(frozen=True)
class RecomputedVerdict:
    """Verdict of a release, decided again from the outcomes of its documents, and equal to the stored one."""

    stored: GateVerdict  # verdict that the release states, with the joint outcome of all stages
    verdict: GateVerdict  # the same, recomputed
    gate_outcome: Outcome  # recomputed outcome of the gate alone
    # Verdicts of a judge or a server. They are part of the joint outcome, but not recomputed.
    further_verdicts: tuple[FurtherVerdict, ...] = ()
    # Numbers that differ from the stored ones after the ninth digit, because library versions differ
    rounding: tuple[VerdictDifference, ...] = ()
    # Versions that differ from those of the run, by name: the run's version, and that of this machine
    versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the recomputed verdict, and what restricts it, as plain data."""
        return {
            **plain_verdict(self.verdict),
            "not_recomputed": [each.model_dump(mode="json") for each in self.further_verdicts],
            "rounding": [str(difference) for difference in self.rounding],
            "versions": dict(self.versions),
        }

    def __str__(self) -> str:
        lines = [f"The gate's verdict follows from the outcomes in the release: {self.gate_outcome}."]
        if self.verdict.publishable and self.gate_outcome != "pass":
            setting = f"on_inconclusive: {self.verdict.on_inconclusive}"
            lines.append(f"It was published although it is {self.gate_outcome}, because the profile sets {setting}.")
        if self.further_verdicts:
            names = ", ".join(f"{each.name} ({each.outcome})" for each in self.further_verdicts)
            lines.append(f"Not recomputed, because they need a model or a server: {names}.")
            lines.append(f"All verdicts together: {self.verdict.outcome}.")
        if self.rounding:
            differing = ", ".join(f"{name} {theirs}, here {ours}" for name, (theirs, ours) in self.versions.items())
            count = f"{len(self.rounding)} numbers differ" if len(self.rounding) > 1 else "1 number differs"
            lines.append(f"{count} after the ninth digit, because versions differ: {differing}.")
        return "\n".join(lines)


def recompute_verdict(
    release: PublishedRelease, files: Collection[str], statement: Mapping[str, Any]
) -> RecomputedVerdict:
    """Decide again from the evidence in a verified release of a merge, without a store, a model or a GPU.

    Raises:
        InvalidInput: The release has no evidence, or another version of the gate decided.
        Refused: The stored verdict, or a score that the documents state, does not follow from the evidence.
    """
    predicate = statement.get("predicate")
    stated = predicate.get("mergegate_verdict") if isinstance(predicate, dict) else None
    facts = _read_facts(release, files)
    return _decide(release, files, stated, models=facts.content.models if facts else ())


def recompute_variants(
    release: PublishedRelease, files: Collection[str], statement: Mapping[str, Any]
) -> dict[str, RecomputedVerdict]:
    """Decide again about every variant in a verified release of quantized variants. Return the verdicts by type.

    The conversion of a variant and the checks of its files and of its runtime need the model, so only their recorded
    results are compared with the verdict on the variant.
    """
    recomputed = {}
    try:
        verdicts = [VariantVerdict.model_validate(each) for each in statement["predicate"][VARIANT_VERDICTS]]
    except (LookupError, TypeError, ValueError) as error:
        raise _mismatch(release.reference, f"verdicts that cannot be read: {_first_line(error)}") from None
    for verdict in verdicts:
        if not verdict.publishable:
            continue
        gate_verdict = verdict.gate
        problems = [*(verdict.conversion.problems if verdict.conversion else ())]
        problems += [str(check) for check in verdict.checks if check.outcome == "fail"]
        if problems or gate_verdict is None:
            problem = problems[0] if problems else "the gate did not decide"
            raise _mismatch(release.reference, f"a verdict that allows {verdict.type}, though {problem}")
        summary = verdict.outcome, verdict.publishable, verdict.reasons
        if summary != (gate_verdict.outcome, gate_verdict.publishable, gate_verdict.reasons):
            raise _mismatch(release.reference, f"a verdict on {verdict.type} that differs from that of its gate")
        stated = gate_verdict.model_dump(mode="json")
        recomputed[verdict.type] = _decide(release, files, stated, verdict.type)
    return recomputed


def compare_documents(
    release: PublishedRelease, files: Mapping[str, tuple[int, str]], statement: Mapping[str, Any]
) -> tuple[list[str], str]:
    """Write the documents of a verified release again. Return a finding for each that differs.

    The second result is a sentence that says whether they were compared.
    """
    facts, here = _read_facts(release, files), versions_here()["mergegate"]
    builder: object = ""
    with suppress(LookupError, TypeError):
        builder = statement["predicate"]["runDetails"]["builder"]["version"]["mergegate"]
    if facts:  # The provenance is one of the documents.
        builder = next((library.version for library in facts.content.versions if library.name == "mergegate"), "")
    if builder != here:
        return [], f"its documents were not written again, because mergegate {builder} wrote them, and this is {here}"
    if facts is None:
        return [f"{FACTS}: missing"], ""
    stated = {name: sha256 for name, (_, sha256) in files.items() if name in DOCUMENTS or name.startswith(EVAL_RESULTS)}
    others = [
        ReleaseFile(name, size, sha256, release.read(name) if name == "tokenizer_config.json" else b"")
        for name, (size, sha256) in files.items()
        if name not in {*stated, SUMS, SIGNATURE, KEYLESS_SIGNATURE}
    ]
    try:
        expected = {file.name: file.sha256 for file in release_documents(facts, others)}
    except (ArithmeticError, AttributeError, InvalidInput, LookupError, TypeError, ValueError) as error:
        return [f"{FACTS}: no documents can be written from it: {_first_line(error)}"], ""
    for name, text in shipped_files(facts.license).items():
        expected[name], stated[name] = sha256_of(text.encode()), files.get(name, (0, ""))[1]
    different = sorted(name for name in {*stated, *expected} if stated.get(name) != expected.get(name))
    findings = [f"{name}: not what the facts in {FACTS} give" for name in different]
    return findings, f"its documents are those that the facts in {FACTS} give"


def _read_facts(release: PublishedRelease, files: Collection[str]) -> DocumentFacts | None:
    """Return the facts that the documents state, or None for a release of an earlier version, which lacks them."""
    try:
        return read_facts(release.read(FACTS)) if FACTS in files else None
    except (InvalidInput, ValueError) as error:
        raise _mismatch(release.reference, f"facts that cannot be read: {_first_line(error)}") from None


def _decide(
    release: PublishedRelease,
    files: Collection[str],
    stated_verdict: object,
    variant_type: str = "",
    models: Sequence[ReportedModel] = (),
) -> RecomputedVerdict:
    """Decide again about a merge, or about the variant of the type, and compare with the verdict in the provenance."""
    reference = f"{release.reference}: {variant_type}" if variant_type else release.reference

    def name_of(file: str) -> str:
        return variant_evidence(file, variant_type) if variant_type else file

    record_name = name_of(EVIDENCE_RECORD)
    if record_name not in files:
        raise InvalidInput(
            reference,
            found=f"no file {record_name}, so its verdict cannot be recomputed",
            expected="a release with the outcomes of its documents",
            remedy="verify it without --verdict, or publish the merge again with this version of mergegate",
        )
    try:
        content = read_document(release.read(record_name), record_name)
    except InvalidInput as error:
        raise _mismatch(reference, f"evidence that leads to no verdict: {_first_line(error)}") from None
    known, here = content.get("versions"), versions_here()
    theirs = known if isinstance(known, dict) else {}
    other_gate = InvalidInput(
        f"{reference}: {record_name}",
        found=f"a verdict of version {content.get('gate_version')} of the gate",
        expected=f"version {gate.version}, which this mergegate ({here['mergegate']}) has",
        remedy=f"verify it with mergegate {theirs.get('mergegate', 'of the time of the release')}",
    )
    try:
        record = VerdictRecord.model_validate(content)
        # A field that mergegate added after the release has its default there.
        stored = plain_verdict(GateVerdict.model_validate(record.verdict))
        stated = GateVerdict.model_validate(stated_verdict)
        joint_stored = plain_verdict(stated)
        tables = {name: release.read(name_of(name)) for name in EVIDENCE_TABLES if name_of(name) in files}
        recomputed = decide_again(record, tables)
        measured = measured_values(record, tables) if models else {}
    # The evidence is untrusted. After any error, the stored verdict does not follow from it.
    except (ArithmeticError, AssertionError, AttributeError, InvalidInput, LookupError, TypeError, ValueError) as error:
        if content.get("gate_version") != gate.version:
            raise other_gate from None
        raise _mismatch(reference, f"evidence that leads to no verdict: {_first_line(error)}") from None
    joint = joint_verdict(record, recomputed)
    differences = list(compare_verdicts(stored, plain_verdict(recomputed)))
    for difference in compare_verdicts(joint_stored, plain_verdict(joint)):
        differences += [difference] if difference not in differences else []
    for model in models:
        values = {"scores": canonical(model.scores), "likelihoods": canonical(model.likelihoods)}
        measured_here = {"scores": None, "likelihoods": None} | measured.get(model.name, {})
        differences += compare_verdicts({model.name: values}, {model.name: measured_here})
    others = {name: (version, here.get(name, "")) for name, version in record.versions.items() if name != "mergegate"}
    others = {name: pair for name, pair in others.items() if pair[0] != pair[1]}
    if differences and record.gate_version != gate.version:
        raise other_gate
    if differences and not (others and all(difference.is_rounding for difference in differences)):
        more = [f"{len(differences) - _SHOWN} more differences"] if len(differences) > _SHOWN else []
        lines = [*map(str, differences[:_SHOWN]), *more]
        raise _mismatch(reference, "a verdict that does not follow from its outcomes: " + "\n  also: ".join(lines))
    return RecomputedVerdict(stated, joint, recomputed.outcome, record.further_verdicts, tuple(differences), others)


def _mismatch(reference: str, found: str) -> Refused:
    return Refused(
        reference,
        found=found,
        expected="the verdict that the gate decides from the files in evidence/",
        remedy="do not use it; download it again from its target, and ask its publisher if the verdict still differs",
    )


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
