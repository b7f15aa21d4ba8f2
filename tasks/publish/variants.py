"""Build the release of quantized variants in one place.

::

    demo-Q8_0.gguf, …                        weights and companions of every variant that passed
    evidence/Q8_0/gate.json, …               evidence of its verdict, as in the release of a merge
    LICENSE, licenses/…, NOTICE, …           the license files of the merge
    report.html, README.md, bom.json         about all variants of this place, including failed ones
    provenance.json, SHA256SUMS, model.sig   with the release of the merge as the only dependency

The release of the merge says nothing about its variants. So a profile can gain a variant, and a variant can fail,
without a new release of the merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.checkpoints import PinnedRecipe
from mergegate.tasks.gate import GateVerdict, RecordedEvidence
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.publish.card_metadata import variant_metadata
from mergegate.tasks.publish.content import (
    BOM,
    CARD,
    COMPLIANCE,
    FACTS,
    KEYLESS_SIGNATURE,
    MAX_METADATA_BYTES,
    PROVENANCE,
    REPORT,
    SIGNATURE,
    SUMS,
    ReleaseFile,
    content_version,
    parse_checksums,
    sha256_of,
    stored_files,
    variant_evidence,
)
from mergegate.tasks.publish.documents import with_documents
from mergegate.tasks.publish.facts import DatasetFacts, variant_facts
from mergegate.tasks.publish.license_files import license_files, open_obligations
from mergegate.tasks.publish.provenance import MergeRelease, VariantOrigin
from mergegate.tasks.publish.public_names import PublicNames
from mergegate.tasks.publish.targets.contract import PublishTarget
from mergegate.tasks.report import ReportContent
from mergegate.tasks.stage import store
from mergegate.tasks.store import Artifact, NotInKey, StoredValue
from mergegate.tasks.variants import VariantFormat, VariantRecord, VariantVerdict


class PassedVariant(NamedTuple):
    """A variant that is published: its type, its weights, and the evidence of its verdict."""

    type: str
    weights: Artifact[VariantRecord]
    evidence: Artifact[RecordedEvidence]


class VariantParts(NamedTuple):
    """Inputs of a release of variants, independent of its target.

    ``content`` is that of the report on the variants of this place (see ``variant_content``). ``merge`` is the release
    that they were quantized from. ``names`` are the public names of local models and texts, and ``held_out`` identifies
    the held-out text, if there is one.
    """

    content: ReportContent
    settings: VariantFormat
    passed: tuple[PassedVariant, ...]
    merge: MergeRelease
    pinned: PinnedRecipe
    license: StoredValue[LicenseVerdict]
    names: PublicNames = PublicNames({})
    held_out: DatasetFacts | None = None

    @property
    def name(self) -> str:
        """Name of the release: that of the merge with the suffix of the place."""
        return self.content.name

    def files(self, target: PublishTarget) -> list[ReleaseFile]:
        """Return all files before SHA256SUMS, as ``ReleaseParts.files`` does."""
        content, names, settings = self.content, self.names, self.settings
        license = names.apply(self.license.value)
        parents = tuple(parent.rename(names.rename_text) for parent in self.pinned.parents)
        weights = {each.type: self._weights(each) for each in self.passed}
        files = [
            *(file for each in weights.values() for file in each),
            *license_files(parents, license, quantized_from=f"{self.merge.name} {self.merge.version}"),
            *(
                ReleaseFile(variant_evidence(file.name, each.type), file.size, file.sha256, file.source)
                for each in self.passed
                for file in stored_files(each.evidence)
            ),
        ]
        files = self._distinct(files)
        local = {name for name, field in type(settings).model_fields.items() if NotInKey in field.metadata}
        entry = names.apply(settings.model_dump(mode="json", exclude=local, exclude_defaults=True))
        origin = VariantOrigin(
            self.merge,
            entry,
            {variant_type: [file.name for file in each] for variant_type, each in weights.items()},
        )
        tags = (str(entry["format"]), *weights)
        metadata = variant_metadata(
            content.kind, parents, license.combination, self.merge.hub_id, settings.library_name, tags
        )
        inputs = (content, self.pinned, license, self.merge, weights)
        facts = variant_facts(*inputs, target, names, self.held_out, settings.calibration)
        missing = open_obligations(parents, license)
        return with_documents(files, content, license, missing, metadata, facts, origin, target)

    def _weights(self, variant: PassedVariant) -> tuple[ReleaseFile, ...]:
        """Return the files of a variant by their public names, with the hashes that the store recorded."""
        artifact, files = variant.weights, []
        for name, path in self.settings.release_files(self.merge.name, artifact).items():
            stored = path.relative_to(artifact.directory).as_posix() if path.is_relative_to(artifact.directory) else ""
            sha256 = artifact.files.get(stored) or store().hashes.sha256(path)
            files.append(ReleaseFile(name, path.stat().st_size, sha256, path))
        return tuple(files)

    def _distinct(self, files: Sequence[ReleaseFile]) -> list[ReleaseFile]:
        """Return each file once. Raise Refused if two different files have the same name."""
        by_name: dict[str, ReleaseFile] = {}
        for file in files:
            if by_name.setdefault(file.name, file).sha256 != file.sha256 or file.name in _RESERVED:
                raise Refused(
                    f"{self.name}: {file.name}",
                    found="a file of a variant has the name of another file of the release",
                    expected="a name of its own for each file",
                    remedy="list the variants as two entries of 'variants', each with a 'suffix' of its own",
                )
        return list(by_name.values())

    @property
    def directories(self) -> tuple[Path, ...]:
        """Local directories. Their paths must not be published."""
        recipe = self.pinned.recipe.directory
        own = (*(path for parent in self.pinned.parents for path in parent.directories), self.settings.python)
        return tuple(path for path in (*own, recipe) if path is not None)


_RESERVED = frozenset({CARD, COMPLIANCE, BOM, FACTS, PROVENANCE, REPORT, SUMS, SIGNATURE, KEYLESS_SIGNATURE})


def variant_content(
    content: ReportContent, name: str, merge: MergeRelease, verdicts: Sequence[VariantVerdict]
) -> ReportContent:
    """Return the content of the report on the variants of one place.

    ``content`` is that of the merge, and ``name`` that of the variants' release. The result has no judgment of the
    merge, which depends on the release that was current at the time. So the same variants of the same merge give the
    same report in every run. Observations that differ between machines, and the texts that a tokenizer splits
    differently, are removed.
    """
    published = []
    for verdict in verdicts:
        checks = tuple(check.model_copy(update={"seen": "", "where": ""}) for check in verdict.checks)
        update: dict[str, object] = {"checks": checks}
        if conversion := verdict.conversion:
            hidden = ("…",) * len(conversion.different_texts)
            update["conversion"] = conversion.model_copy(update={"different_texts": hidden})
        published.append(verdict.model_copy(update=update))
    passed = [verdict for verdict in published if verdict.publishable]
    inconclusive = [verdict for verdict in passed if verdict.outcome != "pass"]
    joint = GateVerdict(
        outcome=inconclusive[0].outcome if inconclusive else "pass",
        publishable=True,
        guards=(),
        drift=None,
        overall_drop=None,
        overall_low=None,
        overall_high=None,
        on_inconclusive=content.verdict.on_inconclusive,
        reasons=tuple(f"variant {verdict.type}: {reason}" for verdict in inconclusive for reason in verdict.reasons),
    )
    return ReportContent(
        name=name,
        method=f"quantized from {merge.name} {merge.version}",
        kind=content.kind,
        models=tuple(model.model_copy(update={"scores": None, "likelihoods": None}) for model in content.models),
        licence=content.licence,
        obligations=content.obligations,
        verdict=joint,
        scoring=content.scoring,
        asked=content.asked,
        windows=content.windows,
        files=content.files,
        versions=content.versions,
        reproduce=(
            "mergegate verify RELEASE --verdict    # decide again from the outcomes in evidence/, without a model",
            "mergegate reproduce RELEASE           # quantize again, and compare the weights byte by byte",
        ),
        variants=tuple(published),
        overrides=content.overrides,
    )


def published_merge(target: PublishTarget, name: str, directory: Path) -> MergeRelease:
    """Return the published release of a merge in ``directory`` as the dependency of its variants.

    ``target`` is that of the merge, and ``name`` the name of its release.

    Raises:
        Refused: The release has no SHA256SUMS.
    """
    try:
        sums = read_plain(directory / SUMS, MAX_METADATA_BYTES)
        listed = parse_checksums(sums.decode())
        hashes = {**listed, SUMS: sha256_of(sums)}
        if (directory / SIGNATURE).exists():
            hashes[SIGNATURE] = sha256_of(read_plain(directory / SIGNATURE, MAX_METADATA_BYTES))
        files = [ReleaseFile(each, (directory / each).stat().st_size, sha, b"") for each, sha in hashes.items()]
    except (OSError, ValueError, InvalidInput) as error:
        raise Refused(
            f"{directory}: {SUMS}",
            found=f"the published release cannot be read: {error}",
            expected="the release that the variants are quantized from",
            remedy="publish the merge again, then run again",
        ) from None
    version = target.version or content_version(files)
    return MergeRelease(name, version, sha256_of(sums), target.reference_to(version), target.hub_id)
