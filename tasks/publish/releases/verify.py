"""Verify a release: compare every file with every statement about it, and the statements with each other.

Each kind of tampering is detected by:

* a flipped byte, a missing or an added file, even a special one (a link, a pipe): SHA256SUMS, the file list of the
  provenance, the bill of materials, and the file list of the signature;
* an edited provenance: SHA256SUMS, which lists it, and the recipe, card, bill of materials and files, which must agree
  with it;
* provenance and SHA256SUMS edited consistently: the version, if it is a content hash (over all files, and known to
  others as the name of the directory or tag);
* everything rebuilt under another version: only a signature, verified with a key from another channel.
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
    checksums_text,
    content_version_from_sums,
    escaped,
    parse_checksums,
    public_key,
    read_signature,
)
from mergegate.tasks.publish.targets import PublishedRelease

Signed = Literal["valid", "not checked", "none"]
Files = Mapping[str, tuple[int, str]]
"""Size in bytes and sha256 of each file, by name."""


@dataclass(frozen=True)
class VerifiedRelease:
    """A consistent release. ``version`` is None unless its name is a content hash."""

    where: str
    listing: Files
    version: str | None
    signed: Signed
    statement: Mapping[str, Any]  # provenance.json, an in-toto statement

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self.listing)

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(size for size, _ in self.listing.values())


def check_release(release: PublishedRelease, key: Path | None = None) -> VerifiedRelease:
    """Verify all files and statements of a release.

    Args:
        key: Public key (ECDSA, PEM) that must have signed the release. None: the signature is not verified.

    Raises:
        Refused: Something does not agree. The message lists every finding.
        InvalidInput: ``key`` is not a public key.
    """
    files = release.files()
    statement = _statement(release, files)
    if key is not None:
        public_key(key)  # report an invalid key first, even if the release is not signed
    findings = [
        *_against_sums(release, files),
        *_against_version(release, files),
        *_against_subjects(files, statement),
        *_against_bom(release, files, statement),
        *_against_recipe(release, files, statement),
        *_against_card(release, files, statement),
        *_against_signature(release, files, key),
    ]
    if findings:
        first, *more = dict.fromkeys(findings)
        raise Refused(
            release.where,
            found="\n  also: ".join((first, *more)),
            expected="a release whose files are what was published, and agree with each other",
            remedy="do not use it; get it again from where it was published, or publish it anew",
        )
    signed: Signed = "none" if SIGNATURE not in files else "valid" if key else "not checked"
    return VerifiedRelease(release.where, files, release.version, signed, statement)


def _statement(release: PublishedRelease, files: Files) -> Mapping[str, Any]:
    statement = _parsed(release, PROVENANCE) if PROVENANCE in files else None
    if not isinstance(statement, dict) or statement.get("_type") != "https://in-toto.io/Statement/v1":
        raise Refused(
            f"{release.where}: {PROVENANCE}",
            found="not there" if PROVENANCE not in files else "no in-toto statement",
            expected="the provenance that every release of mergegate has",
            remedy="it is no release of mergegate, or not all of one: get it again from where it was published",
        )
    return statement


def _against_sums(release: PublishedRelease, files: Files) -> list[str]:
    if SUMS not in files:
        return [f"{SUMS}: missing"]
    text = _text(release, SUMS)
    # The signature is written last and covers SHA256SUMS, so SHA256SUMS cannot list it.
    findings = _differences(parse_checksums(text), _hashes(files, without={SUMS, SIGNATURE}), SUMS)
    if not findings and text != checksums_text(parse_checksums(text)):
        return [f"{SUMS}: not as it was written"]
    return findings


def _against_version(release: PublishedRelease, files: Files) -> list[str]:
    if release.version is None or (content := content_version_from_sums(files)) == release.version:
        return []
    return [f"its version is {release.version}, its content is {content}"]


def _against_subjects(files: Files, statement: Mapping[str, Any]) -> list[str]:
    listed = {
        str(_at(subject, "name")): str(_at(subject, "digest", "sha256")) for subject in _list(_at(statement, "subject"))
    }
    return _differences(listed, _hashes(files, without={PROVENANCE, SIGNATURE, SUMS}), PROVENANCE)


def _against_bom(release: PublishedRelease, files: Files, statement: Mapping[str, Any]) -> list[str]:
    """Compare the bill of materials with the files, and its parents with the provenance."""
    if BOM not in files:
        return []  # already reported as missing
    bom = _parsed(release, BOM)
    listed = {
        str(_at(component, "name")): str(_at(digest, "content"))
        for component in _list(_at(bom, "components"))
        for digest in _list(_at(component, "hashes"))
    }
    findings = _differences(listed, _hashes(files, without={BOM, PROVENANCE, SIGNATURE, SUMS}), BOM)
    ancestors = [
        (_at(item, "name"), _at(item, "version"))
        for item in _list(_at(bom, "metadata", "component", "pedigree", "ancestors"))
    ]
    parents = [
        (_at(item, "name"), _at(item, "digest", "gitCommit") or _at(item, "digest", "sha256"))
        for item in _parents(statement)
    ]
    if ancestors != parents:
        findings.append(f"{BOM}: its parents are not those of {PROVENANCE}")
    return findings


def _against_recipe(release: PublishedRelease, files: Files, statement: Mapping[str, Any]) -> list[str]:
    if RECIPE not in files:
        return []  # already reported as missing
    try:
        documents: object = parse_yaml(_text(release, RECIPE), RECIPE)
    except InvalidInput:
        documents = None
    if documents != _at(statement, "predicate", "buildDefinition", "externalParameters", "recipe"):
        return [f"{PROVENANCE}: its recipe is not that of {RECIPE}"]
    return []


def _against_card(release: PublishedRelease, files: Files, statement: Mapping[str, Any]) -> list[str]:
    """Compare the card's metadata, recipe and parents with the provenance."""
    if not {RECIPE, CARD} <= set(files):
        return []  # already reported as missing
    card = _text(release, CARD)
    findings = []
    metadata, stated = parse_card(_bytes(release, CARD)).fields, _at(statement, "predicate", "mergegate_card")
    if metadata != stated:
        both = {**metadata, **(stated if isinstance(stated, dict) else {})}
        differences = [name for name in both if _at(metadata, name) != _at(stated, name)]
        findings.append(
            f"{CARD}: its metadata is not that of {PROVENANCE} ({', '.join(differences) or 'none can be read'})"
        )
    hub = [
        str(_at(parent, "uri")).removeprefix("pkg:huggingface/").rpartition("@")[0]
        for parent in _parents(statement)
        if _at(parent, "digest", "gitCommit")
    ]
    if (_at(metadata, "base_model") or []) != list(dict.fromkeys(hub)):
        findings.append(f"{CARD}: its base_model is not what {PROVENANCE} was made from")
    license = _at(statement, "predicate", "mergegate_licence", "card")
    if not isinstance(license, dict) or any(_at(metadata, name) != value for name, value in license.items()):
        findings.append(f"{CARD}: its licence is not that of {PROVENANCE}")
    if _text(release, RECIPE).strip() not in card:
        findings.append(f"{CARD}: its recipe is not that of {RECIPE}")
    for parent in _parents(statement):
        digest = str(_at(parent, "digest", "gitCommit") or str(_at(parent, "digest", "sha256"))[:16])
        if f"| {escaped(str(_at(parent, 'name')))} |" not in card or digest not in card:
            findings.append(f"{CARD}: does not name the parent {_at(parent, 'name')} of {PROVENANCE}")
    return findings


def _against_signature(release: PublishedRelease, files: Files, key: Path | None) -> list[str]:
    if SIGNATURE not in files:
        return [f"{SIGNATURE}: missing; it is not signed"] if key else []
    try:
        signature = read_signature(_bytes(release, SIGNATURE))
    except ValueError as error:
        return [f"{SIGNATURE}: {error}"]
    findings = _differences(signature.files, _hashes(files, without={SIGNATURE}), SIGNATURE)
    if key and not signature.is_by(key):
        findings.append(f"{SIGNATURE}: not signed with the key {key.name}")
    return findings


def _hashes(files: Files, without: Collection[str]) -> dict[str, str]:
    return {name: sha256 for name, (_, sha256) in files.items() if name not in without}


def _parsed(release: PublishedRelease, name: str) -> object:
    """Return the content of a JSON file of a release, or None if it cannot be parsed."""
    try:
        return parse_json(_bytes(release, name), name)
    except InvalidInput:
        return None


def _bytes(release: PublishedRelease, name: str) -> bytes:
    """Return the content of a file, or empty bytes for a special file, which the lists of files detect by hash."""
    try:
        return release.read(name)
    except InvalidInput:
        return b""


def _text(release: PublishedRelease, name: str) -> str:
    return _bytes(release, name).decode(errors="replace")


def _parents(statement: Mapping[str, Any]) -> list[Any]:
    dependencies = _list(_at(statement, "predicate", "buildDefinition", "resolvedDependencies"))
    return [item for item in dependencies if _at(item, "annotations", "role") != "text"]


def _differences(listed: Mapping[str, str], actual: Mapping[str, str], source: str) -> list[str]:
    """Return the differences between the files that ``source`` lists and the actual files (name to sha256)."""
    return [
        f"{name}: missing, though {source} lists it"
        if name not in actual
        else f"{name}: not listed by {source}"
        if name not in listed
        else f"{name}: sha256 is {actual[name][:12]}…, {source} says {listed[name][:12]}…"
        for name in sorted({*listed, *actual})
        if listed.get(name) != actual.get(name)
    ]


def _at(value: object, *path: str) -> Any:
    """Return the value at ``path`` in plain data, or None if there is no such key."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
