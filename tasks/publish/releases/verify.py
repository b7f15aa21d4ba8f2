"""Verify a release: compare its files with every statement about them, and the statements with each other.

The following changes to a release are detected:

* a changed byte, a missing or an added file, even a special one (a link, a pipe): by SHA256SUMS, and by the file lists
  of the provenance, the bill of materials and the signature;
* an edited provenance: by SHA256SUMS, which lists it, and by the recipe, card, bill of materials and files, which must
  agree with it;
* a provenance and SHA256SUMS that were edited consistently: by the version, if that is a content hash, because users
  know it as the name of the directory or tag;
* a complete rebuild under another version: only by a signature, verified with a key from another channel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import parse_json, parse_yaml
from mergegate.tasks.checkpoints import parse_card
from mergegate.tasks.publish import (
    BOM,
    CARD,
    PROVENANCE,
    RECIPE,
    SIGNATURE,
    SUMS,
    VERSION_DIGITS,
    checksums_text,
    escape,
    parse_checksums,
    public_key,
    read_signature,
)
from mergegate.tasks.publish.releases.recompute import RecomputedVerdict, recompute_verdict
from mergegate.tasks.publish.targets import PublishedRelease
from mergegate.tasks.store import merkle

Signed = Literal["valid", "not checked", "none"]
Files = Mapping[str, tuple[int, str]]
"""Size in bytes and sha256 of each file, by name."""
_SIGNATURES: Mapping[Signed, str] = {
    "valid": "the signature is valid",
    "not checked": "it is signed; pass the public key (--key) to check the signature",
    "none": "it is not signed",
}
_NO_DIGEST = "its name is not a digest, so it is compared only with its own records"


@dataclass(frozen=True)
class VerifiedRelease:
    """A release whose files and statements agree.

    Attributes:
        reference: Directory or URL of the release.
        listing: Size and sha256 of each file.
        version: Version of the release. None unless its name is a content hash.
        signed: Whether the signature is ``valid`` or ``not checked``, or ``none`` if there is none.
        statement: Provenance of the release, an in-toto statement.
        recomputed: Verdict that was decided again from the release. None unless that was requested.
    """

    reference: str
    listing: Files
    version: str | None
    signed: Signed
    statement: Mapping[str, Any]
    recomputed: RecomputedVerdict | None = None

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self.listing)

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(size for size, _ in self.listing.values())

    def __str__(self) -> str:
        version = f"its content matches its version {self.version}" if self.version else _NO_DIGEST
        head = f"{self.reference}: {self.files} files, {self.bytes / 1e6:,.1f} MB, all as published"
        return f"{head}\n  {version}\n  {_SIGNATURES[self.signed]}"


def check_release(release: PublishedRelease, key: Path | None = None, *, recompute: bool = False) -> VerifiedRelease:
    """Verify all files and statements of a release.

    Args:
        release: The release.
        key: Public key (ECDSA, PEM) that must have signed the release. None: the signature is not verified.
        recompute: Whether to recompute the verdict from the outcomes in the release. Default: false.

    Raises:
        Refused: Files or statements disagree, or the verdict does not follow from the outcomes. The message lists every
            finding.
        InvalidInput: ``key`` is not a public key, or the verdict cannot be recomputed.
    """
    check = _ReleaseCheck(release)
    if key is not None:
        public_key(key)  # report an invalid key first, even if the release is not signed
    if SUMS in check.files:
        text = check.text(SUMS)
        # The signature is written last and covers SHA256SUMS, so SHA256SUMS cannot list it.
        is_equal = check.compare_files(parse_checksums(text), SUMS, unlisted_files={SUMS, SIGNATURE})
        if is_equal and text != checksums_text(parse_checksums(text)):
            check.findings.append(f"{SUMS}: not in the form that mergegate writes")
    else:
        check.findings.append(f"{SUMS}: missing")
    content = merkle(check.files)[:VERSION_DIGITS]
    if release.version not in (None, content):
        check.findings.append(f"its version is {release.version}, its content is {content}")
    check.compare_statements()
    check.compare_card()
    if SIGNATURE in check.files:
        try:
            signature = read_signature(check.read(SIGNATURE))
        except ValueError as error:
            check.findings.append(f"{SIGNATURE}: {error}")
        else:
            check.compare_files(signature.files, SIGNATURE, unlisted_files={SIGNATURE})
            if key and not signature.matches_key(key):
                check.findings.append(f"{SIGNATURE}: not signed with the key {key.name}")
    elif key is not None:
        check.findings.append(f"{SIGNATURE}: missing; the release is not signed")
    if check.findings:
        first, *more = dict.fromkeys(check.findings)
        raise Refused(
            release.reference,
            found="\n  also: ".join((first, *more)),
            expected="a release whose files are as published and agree with each other",
            remedy="do not use it; download it again from its target, or publish it again",
        )
    signed: Signed = "none" if SIGNATURE not in check.files else "valid" if key else "not checked"
    recomputed = recompute_verdict(release, check.files, check.statement) if recompute else None
    return VerifiedRelease(release.reference, check.files, release.version, signed, check.statement, recomputed)


class _ReleaseCheck:
    """Comparisons of one release, each of which adds to ``findings``. Only lists of files report a missing file."""

    def __init__(self, release: PublishedRelease) -> None:
        self.release, self.files = release, release.files()
        self.findings: list[str] = []
        statement = self._json(PROVENANCE) if PROVENANCE in self.files else None
        if not isinstance(statement, dict) or statement.get("_type") != "https://in-toto.io/Statement/v1":
            raise Refused(
                f"{release.reference}: {PROVENANCE}",
                found="not an in-toto statement" if PROVENANCE in self.files else "the file is missing",
                expected="the provenance that every release of mergegate has",
                remedy="this is not a complete release of mergegate; download it again from its target",
            )
        self.statement: Mapping[str, Any] = statement
        dependencies = _list(_at(statement, "predicate", "buildDefinition", "resolvedDependencies"))
        self.parents = [item for item in dependencies if _at(item, "annotations", "role") != "text"]

    def compare_statements(self) -> None:
        """Compare provenance and bill of materials with the files, the recipe and each other."""
        listed = {
            str(_at(subject, "name")): str(_at(subject, "digest", "sha256"))
            for subject in _list(_at(self.statement, "subject"))
        }
        self.compare_files(listed, PROVENANCE, unlisted_files={PROVENANCE, SIGNATURE, SUMS})
        if RECIPE in self.files:
            try:
                documents: object = parse_yaml(self.text(RECIPE), RECIPE)
            except InvalidInput:
                documents = None
            if documents != _at(self.statement, "predicate", "buildDefinition", "externalParameters", "recipe"):
                self.findings.append(f"{PROVENANCE}: its recipe is not that of {RECIPE}")
        if BOM not in self.files:
            return
        bom = self._json(BOM)
        listed = {
            str(_at(component, "name")): str(_at(digest, "content"))
            for component in _list(_at(bom, "components"))
            for digest in _list(_at(component, "hashes"))
        }
        self.compare_files(listed, BOM, unlisted_files={BOM, PROVENANCE, SIGNATURE, SUMS})
        ancestors = [
            (_at(item, "name"), _at(item, "version"))
            for item in _list(_at(bom, "metadata", "component", "pedigree", "ancestors"))
        ]
        parents = [
            (_at(item, "name"), _at(item, "digest", "gitCommit") or _at(item, "digest", "sha256"))
            for item in self.parents
        ]
        if ancestors != parents:
            self.findings.append(f"{BOM}: its parents are not those of {PROVENANCE}")

    def compare_card(self) -> None:
        """Compare the card's metadata, recipe and parents with the provenance."""
        if not {RECIPE, CARD} <= set(self.files):
            return
        card = self.text(CARD)
        metadata = parse_card(self.read(CARD)).fields
        stated = _at(self.statement, "predicate", "mergegate_card")
        if metadata != stated:
            both = {**metadata, **(stated if isinstance(stated, dict) else {})}
            differences = ", ".join(name for name in both if _at(metadata, name) != _at(stated, name))
            detail = differences or "none can be read"
            self.findings.append(f"{CARD}: its metadata is not that of {PROVENANCE} ({detail})")
        hub_ids = [
            str(_at(parent, "uri")).removeprefix("pkg:huggingface/").rpartition("@")[0]
            for parent in self.parents
            if _at(parent, "digest", "gitCommit")
        ]
        if (_at(metadata, "base_model") or []) != list(dict.fromkeys(hub_ids)):
            self.findings.append(f"{CARD}: its base_model differs from the parents in {PROVENANCE}")
        license = _at(self.statement, "predicate", "mergegate_licence", "card")
        if not isinstance(license, dict) or any(_at(metadata, name) != value for name, value in license.items()):
            self.findings.append(f"{CARD}: its license is not that of {PROVENANCE}")
        if self.text(RECIPE).strip() not in card:
            self.findings.append(f"{CARD}: its recipe is not that of {RECIPE}")
        for parent in self.parents:
            digest = str(_at(parent, "digest", "gitCommit") or str(_at(parent, "digest", "sha256"))[:16])
            if f"| {escape(str(_at(parent, 'name')))} |" not in card or digest not in card:
                self.findings.append(f"{CARD}: does not name the parent {_at(parent, 'name')} of {PROVENANCE}")

    def compare_files(self, listed_digests: Mapping[str, str], source: str, unlisted_files: Collection[str]) -> bool:
        """Compare the files with the list in ``source`` (sha256 by name), and return whether they are equal.

        ``unlisted_files`` are written after ``source``, so it cannot list them.
        """
        actual = {name: sha256 for name, (_, sha256) in self.files.items() if name not in unlisted_files}
        for name in sorted({*listed_digests, *actual}):
            if name not in actual:
                self.findings.append(f"{name}: missing, though {source} lists it")
            elif name not in listed_digests:
                self.findings.append(f"{name}: not listed by {source}")
            elif listed_digests[name] != actual[name]:
                self.findings.append(
                    f"{name}: sha256 is {actual[name][:12]}…, {source} specifies {listed_digests[name][:12]}…"
                )
        return listed_digests == actual

    def _json(self, name: str) -> object:
        """Return the content of a JSON file, or None if it cannot be parsed."""
        try:
            return parse_json(self.read(name), name)
        except InvalidInput:
            return None

    def read(self, name: str) -> bytes:
        """Return the content of a file, or empty bytes for a special file, which the lists of files report."""
        try:
            return self.release.read(name)
        except InvalidInput:
            return b""

    def text(self, name: str) -> str:
        return self.read(name).decode(errors="replace")


def _at(value: object, *path: str) -> Any:
    """Return the value at ``path`` in plain data, or None if there is no such key."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
