"""Write the documents of a release as a function of its facts, which the release contains as ``evidence/facts.json``.

``mergegate verify --verdict`` writes the documents again from this file and the other files, and compares every byte.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.merge import describe_changes
from mergegate.tasks.preflight.licenses import LicenseVerdict, Obligation
from mergegate.tasks.publish.bom import bill_of_materials, merge_bill, variant_bill
from mergegate.tasks.publish.card import Publication, escape, model_card, variant_card
from mergegate.tasks.publish.card_metadata import check_card, eval_results, model_index
from mergegate.tasks.publish.compliance import compliance_section, compliance_sheet
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
from mergegate.tasks.publish.facts import ReleaseFacts
from mergegate.tasks.publish.provenance import MergeOrigin, VariantOrigin, provenance
from mergegate.tasks.publish.settings import SigstoreSettings
from mergegate.tasks.publish.targets.contract import PublishTarget
from mergegate.tasks.report import ReportContent, render
from mergegate.tasks.store import without_unkeyed


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
