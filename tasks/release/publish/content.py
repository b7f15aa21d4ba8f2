"""Define the files of a release (names, hashes and content) and their list of checksums.

SHA256SUMS lists the sha256 of every file written before it, in the format of ``sha256sum --check``. It reveals an
edited ``provenance.json``, which cannot list itself. If both are edited, only two things reveal it: a version that is a
hash over all files including SHA256SUMS, or a signature, which is written last and covers SHA256SUMS, too.

There are two kinds of releases: a merge, and the quantized variants of a merge that share a place. ``buildType`` in the
provenance tells the kind. The provenance of variants differs from that of a merge in these parts::

    externalParameters        {"profile": name, "variant": entry of the profile's 'variants'}
    resolvedDependencies      one: the release of the merge, by the sha256 of its SHA256SUMS
    VARIANT_VERDICTS          verdict of every variant of the entry (``VariantVerdict``), also of those that failed

The evidence of each published variant is in a directory of its own (``variant_evidence``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import Refused
from mergegate.merge_core.parsing import JsonBounds, parse_json_object, unique_keys
from mergegate.tasks.base.store import MANIFEST, VALUE, Artifact, merkle

CARD = "README.md"
RECIPE = "recipe.yaml"
BOM = "bom.json"
PROVENANCE = "provenance.json"
SIGNATURE = "model.sig"
KEYLESS_SIGNATURE = "model.sigstore.json"  # differs at every signing, so no version and no other file covers it
COMPLIANCE = "COMPLIANCE.md"
REPORT = "report.html"
FACTS = "evidence/facts.json"
EVAL_RESULTS = ".eval_results/"  # directory
MODIFICATIONS = "MODIFICATIONS"
STATEMENT_OF_CHANGES = "**Statement of changes.**"  # before the statement in a card, for ``mergegate verify``
SUMS = "SHA256SUMS"
# Documents that are a function of FACTS and the other files, except those in EVAL_RESULTS.
DOCUMENTS = frozenset({REPORT, RECIPE, COMPLIANCE, CARD, BOM, PROVENANCE})
# Names that no file of a variant may have. Some quantizers write a recipe of their own.
RESERVED_NAMES = (DOCUMENTS - {RECIPE}) | {FACTS, SUMS, SIGNATURE, KEYLESS_SIGNATURE}
# JSON files in a release that describe the checkpoint and are not part of it.
DESCRIPTION_FILES = frozenset({BOM, PROVENANCE, KEYLESS_SIGNATURE})
MERGE_BUILD = "urn:mergegate:merge:v1"  # types of builds
VARIANT_BUILD = "urn:mergegate:variant:v1"
RELEASE_URN = "urn:mergegate:release:"  # followed by the sha256 of the SHA256SUMS of a release
VARIANT_VERDICTS = "mergegate_variants"  # field of the predicate
STATEMENT_TYPES = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"  # of provenance.json
VERSION_DIGITS = 12  # leading digits of a content hash that name a version
# Largest file of a release, other than weights, that is read into memory.
MAX_METADATA_BYTES = 64 << 20
# Names of everything that mergegate writes about a model, in the only directories for it. Any other file is part of the
# model, because a library may load it: a tokenizer reads 'special_tokens_map.json' if there is one.
_MODEL_DOCUMENTS = re.compile(
    "|".join(
        (
            *map(re.escape, (*DOCUMENTS, FACTS, MODIFICATIONS, SUMS, SIGNATURE, KEYLESS_SIGNATURE)),
            rf"LICENSE|NOTICE|licenses/[^/]+\.txt|{re.escape(EVAL_RESULTS)}[^/]+\.yaml",
            r"evidence/([^/]+/)?(gate\.json|outcomes\.parquet|likelihoods\.parquet)",
        )
    )
)


@dataclass(frozen=True)
class ReleaseFile:
    """One file of a release. ``source`` is its path on this machine, or its content."""

    name: str  # relative, with forward slashes
    size: int
    sha256: str
    source: Path | bytes

    def read(self) -> bytes:
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the content in pieces of ``size`` bytes. Raise Refused if the source was removed since the gate."""
        if isinstance(self.source, bytes):
            yield from (self.source[start : start + size] for start in range(0, len(self.source), size))
            return
        try:
            with self.source.open("rb") as source:
                while data := source.read(size):
                    yield data
        except FileNotFoundError:
            raise self.alteration_error() from None

    def gated_chunks(self, size: int) -> Iterator[bytes]:
        """Yield the content in pieces of ``size`` bytes. Raise Refused at the end if it is not that of the gate."""
        digest = hashlib.sha256()
        for chunk in self.chunks(size):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != self.sha256:
            raise self.alteration_error(digest.hexdigest())

    def alteration_error(self, sha256: str = "", problem: str = "the file is missing") -> Refused:
        """Return the error for a source that has changed since the gate: its new ``sha256``, or another ``problem``."""
        return Refused(
            str(self.source),
            found=f"sha256 {sha256[:12]}…" if sha256 else problem,
            expected=f"sha256 {self.sha256[:12]}…, the bytes that were evaluated and gated",
            remedy="run again: mergegate rebuilds the altered artifact",
        )


def stored_files(artifact: Artifact[Any]) -> tuple[ReleaseFile, ...]:
    """Return the files of an artifact without those that only the store uses."""
    return tuple(
        ReleaseFile(name, (artifact.directory / name).stat().st_size, sha256, artifact.directory / name)
        for name, sha256 in sorted(artifact.files.items())
        if name not in (MANIFEST, VALUE)
    )


def written_file(name: str, text: str) -> ReleaseFile:
    """Return a file of the release with the content ``text``."""
    data = text.encode()
    return ReleaseFile(name, len(data), sha256_of(data), data)


def read_document(content: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON file of a release, which may come from anyone.

    Raise InvalidInput if it is not a JSON object, or if two keys are equal, because readers differ in the one they use.
    """
    return parse_json_object(content, name, bounds=JsonBounds(size=MAX_METADATA_BYTES), pairs=unique_keys)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_identities(files: Iterable[ReleaseFile]) -> dict[str, tuple[int, str]]:
    """Return size in bytes and sha256 of each file, by name."""
    return {file.name: (file.size, file.sha256) for file in files}


def variant_evidence(name: str, variant_type: str) -> str:
    """Return the name of an evidence file in a release of variants, such as 'evidence/Q8_0/gate.json'."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{variant_type}/{file}"


def content_digest(files: Mapping[str, tuple[int, str]]) -> str:
    """Return the Merkle digest over files, given as size in bytes and sha256 by name, except the keyless signature.

    A keyless signature differs at every signing. Without it, the same files have the same version and the same digest.
    """
    return merkle({name: identity for name, identity in files.items() if name != KEYLESS_SIGNATURE})


def content_version(files: Iterable[ReleaseFile]) -> str:
    """Return the version name for these files: the first 12 hex digits of their content digest."""
    return content_digest(file_identities(files))[:VERSION_DIGITS]


def is_content_version(name: str) -> bool:
    """Return whether ``name`` has the form of a content hash. Otherwise, a user chose it."""
    return re.fullmatch(r"[0-9a-f]{12}", name) is not None


def checksums_text(hashes: Mapping[str, str]) -> str:
    """Return the content of SHA256SUMS, sorted by name, for the sha256 of each file by name."""
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items()))


def parse_checksums(text: str) -> dict[str, str]:
    """Return the sha256 of each file by name. Malformed lines are skipped, so their files count as unlisted."""
    entries = (line.split("  ", 1) for line in text.splitlines())
    return {entry[1]: entry[0] for entry in entries if len(entry) == 2}


def is_rebuilt(name: str) -> bool:
    """Return whether a rebuild must give a file of a release, because it is not a document of mergegate."""
    return not _MODEL_DOCUMENTS.fullmatch(name)
