"""Write the documents of a release as a function of its facts, which the release contains as ``evidence/facts.json``.

``mergegate verify --verdict`` writes the documents again from this file and the other files, and compares every byte.

The compliance sheet collects facts that a modifier of a general-purpose model may need under the AI Act (Regulation
(EU) 2024/1689). Each fact has a source, and each missing fact is listed. The sheet draws no legal conclusion. The
Commission's guidelines name an indicative criterion: a modifier becomes the provider of a general-purpose model if the
modification takes more than a third of the training compute of the original model. If that number cannot be known or
estimated, a third of 10^23 operations is the threshold, and a third of 10^25 for models with systemic risk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.merge import describe_changes
from mergegate.tasks.preflight.licenses import LicenseVerdict, Obligation
from mergegate.tasks.publish.content import (
    BOM,
    CARD,
    COMPLIANCE,
    FACTS,
    PROVENANCE,
    RECIPE,
    REPORT,
    ReleaseFile,
    read_document,
    written_file,
)
from mergegate.tasks.publish.documents.bom import bill_of_materials, merge_bill, variant_bill
from mergegate.tasks.publish.documents.card import Publication, escape, model_card, render_markdown, variant_card
from mergegate.tasks.publish.documents.card_metadata import check_card, eval_results, model_index
from mergegate.tasks.publish.documents.facts import ParentFacts, ReleaseFacts
from mergegate.tasks.publish.documents.provenance import MergeOrigin, VariantOrigin, provenance
from mergegate.tasks.publish.settings import SigstoreSettings
from mergegate.tasks.publish.targets.contract import PublishTarget
from mergegate.tasks.report import ReportContent, render
from mergegate.tasks.store import without_unkeyed

_GENERAL_PURPOSE = 1e23  # indicative criterion of the guidelines for a general-purpose model
_USES = {"Intended use": "intended_use", "Out of scope": "out_of_scope", "Known limits": "limits"}


@dataclass(frozen=True)
class ModificationThreshold:
    """A third of the training compute of the original model, to compare the modification with.

    Attributes:
        flop: Threshold in floating-point operations.
        reason: Clause that says which number was used and why.
    """

    flop: float
    reason: str

    @classmethod
    def from_parents(cls, parents: Sequence[ParentFacts]) -> ModificationThreshold:
        """Return the smallest threshold of all parents. For an unknown training compute, a third of 10^23 counts."""
        known = [parent for parent in parents if parent.training_compute is not None]
        smallest = min(known, key=lambda parent: parent.training_compute or 0.0, default=None)
        unknown = len(parents) - len(known)
        if smallest is not None and smallest.training_compute is not None:
            own = smallest.training_compute
            if not unknown or own <= _GENERAL_PURPOSE:
                source = escape(smallest.training_compute_source)
                others = ", the smallest known training compute of a parent" if len(parents) > 1 else ""
                return cls(own / 3, f"a third of {flop_text(own)} for {escape(smallest.name)} ({source}){others}")
        which = "a parent" if len(parents) == 1 or unknown < len(parents) else "the parents"
        return cls(
            _GENERAL_PURPOSE / 3,
            f"a third of 10^23, because the training compute of {which} is unknown; for models with systemic risk, "
            "a third of 10^25 would count",
        )


def flop_text(value: float) -> str:
    """Return a number of operations, rounded to two digits: ``3.3 · 10^22``."""
    if value <= 0:
        return "0"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa} · 10^{int(exponent)}"


def compliance_sheet(
    facts: ReleaseFacts,
    content: ReportContent,
    license: LicenseVerdict,
    missing: Sequence[Obligation],
    files: Sequence[str],
) -> str:
    """Return the content of COMPLIANCE.md. The arguments after ``content`` are those of ``model_card``."""
    calibration = [data.name for data in facts.datasets if data.purpose == "calibration"]
    if facts.modification.prompts:
        calibration.append(f"{facts.modification.prompts} prompts of the recipe for the routers")
    groups: dict[object, list[ParentFacts]] = {}
    originals = sorted(facts.ancestors or facts.parents, key=lambda parent: parent.role != "base")  # as in the card
    for parent in (*(facts.parents if facts.ancestors else ()), *originals):
        # Checkpoints of a training run share one card.
        key = replace(parent, name="", identity="", cards=tuple(replace(card, model="") for card in parent.cards))
        groups.setdefault(key if parent.cards and not parent.url else parent, []).append(parent)
    return render_markdown(
        "compliance.md.j2",
        facts=facts,
        content=content,
        license=license,
        missing=tuple(missing),
        files=files,
        threshold=ModificationThreshold.from_parents(originals),
        calibration=calibration,
        parents=list(groups.values()),
        uses=_USES,
        absent=list(_missing(facts)),
        flop_text=flop_text,
    )


def compliance_section(facts: ReleaseFacts) -> str:
    """Return the summary of the sheet for the card, without its heading."""
    originals, flop = facts.ancestors or facts.parents, facts.modification.flop
    threshold = ModificationThreshold.from_parents(originals)
    summaries = sum(bool(parent.training_summaries) for parent in originals)
    policies = sum(bool(parent.copyright_policies) for parent in originals)
    lines = [
        f"* Modification: at most {flop_text(flop)} floating-point operations, {flop_text(flop / threshold.flop)} of "
        f"the threshold ({threshold.reason}).",
        f"* Parents whose card links to a summary of the training content: {summaries} of {len(originals)}; to a "
        f"copyright policy: {policies} of {len(originals)}.",
        *(
            f"* {title}: {' '.join(map(escape, getattr(facts.about, field))) or 'not stated by the publisher.'}"
            for title, field in _USES.items()
        ),
    ]
    return (
        f"[{COMPLIANCE}]({COMPLIANCE}) has these facts with their sources, and lists what is missing. It is not legal "
        "advice.\n\n" + "\n".join(lines)
    )


def _missing(facts: ReleaseFacts) -> Iterator[str]:
    """Yield one sentence for each fact without a source."""
    about = facts.about
    if about.supplier is None:
        yield "Publisher: set `publish.about.supplier`."
    for title, field in _USES.items():
        if not getattr(about, field):
            yield f"{title}: set `publish.about.{field}`."
    if facts.parameters is None:
        yield "Number of parameters: the stored weights do not show it."
    if all(data.purpose == "calibration" for data in facts.datasets):
        yield "Evaluation: no model was evaluated."
    names_by_absent_facts: dict[str, list[str]] = {}
    for parent in {parent.cards or parent.name: parent for parent in facts.ancestors or facts.parents}.values():
        absent = ", ".join(
            name
            for name, value in (
                ("license", parent.license),
                ("training compute", parent.training_compute),
                ("summary of the training content", parent.training_summaries),
                ("copyright policy", parent.copyright_policies),
                ("training data", parent.datasets),
                ("energy or emissions of the training", parent.energy or parent.emissions),
            )
            if not value
        )
        if absent:
            names_by_absent_facts.setdefault(absent, []).append(escape(parent.name))
    for absent, names in names_by_absent_facts.items():
        yield f"{', '.join(names)}: {absent}."


class DocumentFacts(BaseModel):
    """Everything that the documents of a release state, with public names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: dict[str, str]  # sha256 of each file of the model, of its licenses and of its evidence, by name
    content: ReportContent  # content of the report
    license: LicenseVerdict  # license verdict, without the texts of ancestors
    missing: tuple[Obligation, ...]  # obligations that the release does not fulfill
    metadata: dict[str, Any]  # metadata of the card
    facts: ReleaseFacts  # facts about the model and its parents
    origin: MergeOrigin | VariantOrigin  # inputs of the merge or of the variants, without directories
    signed: bool  # whether a key signs the release
    keyless: SigstoreSettings | None  # settings of the keyless signature. None: there is none.
    version: str | None  # name of the version. None: it follows from the content.

    def documents(self, other_files: Sequence[ReleaseFile]) -> list[ReleaseFile]:
        """Return the documents of the release. ``other_files`` are all other files that are written before SHA256SUMS.

        Each document describes the files before it: the card describes the checkpoint, the bill of materials lists the
        files, and the provenance covers them all.
        """
        content, license, origin = self.content, self.license, self.origin
        metadata = {**self.metadata, **license.combination.card, **model_index(content)}
        files = [*other_files, written_file(REPORT, render(content))]
        versions = {library.name: library.version for library in content.versions}
        if isinstance(origin, MergeOrigin):
            results = eval_results(content, self.facts.hub_id, self.version)
            files += [written_file(name, text) for name, text in results.items()]
            files.append(written_file(RECIPE, content.recipe))
            versions |= origin.numerics.versions
        names = sorted(file.name for file in files)
        files.append(written_file(COMPLIANCE, compliance_sheet(self.facts, content, license, self.missing, names)))
        device = origin.numerics.device if isinstance(origin, MergeOrigin) else "cpu"
        about = (self.facts.address, self.signed, device, compliance_section(self.facts), versions, self.keyless)
        inputs = (content, metadata, license, self.missing, names)
        if isinstance(origin, MergeOrigin):
            changes = describe_changes(origin.weights, [escape(parent.ref) for parent in origin.parents])
            card, bill = model_card(*inputs, Publication(*about), changes), merge_bill
        else:
            card, bill = variant_card(*inputs, origin, Publication(*about), self.facts.hub_id), variant_bill
        files.append(written_file(CARD, card))
        listed = bill(files, content, self.facts, license.combination.card)
        files.append(written_file(BOM, bill_of_materials(listed)))
        statement = provenance(files, content, origin, license, metadata)
        return [*files[len(other_files) :], written_file(PROVENANCE, statement)]


def with_documents(
    other_files: Sequence[ReleaseFile],
    content: ReportContent,
    license: LicenseVerdict,
    missing: Sequence[Obligation],
    metadata: dict[str, Any],
    facts: ReleaseFacts,
    origin: MergeOrigin | VariantOrigin,
    target: PublishTarget,
) -> list[ReleaseFile]:
    """Return all files of a release before SHA256SUMS: ``other_files``, the facts, and the documents.

    The other arguments are those of ``DocumentFacts`` as they were computed, and the target of the release.

    Raises:
        Refused: The Hub would misread the card.
    """
    ancestors = tuple(ancestor.model_copy(update={"own_text": ""}) for ancestor in license.ancestors)
    keyless = target.sigstore
    if keyless and keyless.trust_config:  # The documents only state that there is such a file.
        keyless = keyless.model_copy(update={"trust_config": Path("FILE")})
    recorded = DocumentFacts(
        files={file.name: file.sha256 for file in other_files},
        content=without_unkeyed(content),
        license=license.model_copy(update={"ancestors": ancestors}),
        missing=tuple(missing),
        metadata=metadata,
        facts=facts,
        origin=origin,
        signed=target.sign_key is not None,
        keyless=keyless,
        version=target.version,
    )
    # Not sorted: the order of the metadata and of other mappings is that in the documents.
    text = json.dumps(recorded.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
    files = [*other_files, written_file(FACTS, f"{text}\n")]
    documents = read_facts(files[-1].read()).documents(files)  # as ``mergegate verify`` reads them
    card = next(file for file in documents if file.name == CARD)
    check_card(card.read().decode(), metadata, [file.name for file in (*files, *documents)])
    return [*files, *documents]


def read_facts(content: bytes) -> DocumentFacts:
    """Parse the content of ``evidence/facts.json``. Raise InvalidInput or ValueError if it is not valid."""
    return DocumentFacts.model_validate(read_document(content, FACTS))
