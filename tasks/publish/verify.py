"""Does a release hold what it says, and say the same everywhere? Every file against every statement about it.

What notices what:

* a flipped byte, a missing or an added file: SHA256SUMS and the provenance's list of files;
* an edited provenance: SHA256SUMS, which lists it, and the recipe, card and files, which it must agree with;
* provenance and SHA256SUMS edited to agree: the version, where it is the content (a hash over all files, known to
  others as the name of the directory or tag);
* all of it made anew under another version: only a signature, checked with a key that came another way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from merge_core.errors import Refused
from tasks.publish.content import CARD, PROVENANCE, RECIPE, SIGNATURE, SUMS
from tasks.publish.signature import is_signed_by, signed_statement
from tasks.publish.standing import Standing
from tasks.publish.sums import parse_sums, sums_text, version_of

Signed = Literal["valid", "not checked", "none"]


@dataclass(frozen=True)
class Verified:
    """A release in which everything agrees. ``version`` is None where its name is not its content."""

    where: str
    files: int
    bytes: int
    version: str | None
    signed: Signed
    statement: Mapping[str, Any]  # provenance.json, an in-toto statement


def verify(release: Standing, key: Path | None = None) -> Verified:
    """Compare everything with everything.

    Args:
        key: Ed25519 public key (PEM) that must have signed it; None: a signature is not checked.

    Raises:
        Refused: when anything does not agree, with every finding at once.
        InvalidInput: when ``key`` is no public key.
    """
    files = release.files()
    statement = _statement(release, files)
    findings = [
        *_against_sums(release, files),
        *_against_version(release, files),
        *_against_subjects(files, statement),
        *_against_texts(release, files, statement),
        *_against_signature(release, files, key),
    ]
    if findings:
        first, *others = dict.fromkeys(findings)
        raise Refused(
            release.where,
            found="\n  also: ".join((first, *others)),
            expected="a release whose files are what was published, and agree with each other",
            remedy="do not use it; get it again from where it was published, or publish it anew",
        )
    signed: Signed = "none" if SIGNATURE not in files else "valid" if key else "not checked"
    size = sum(size for size, _ in files.values())
    return Verified(release.where, len(files), size, release.version, signed, statement)


Files = Mapping[str, tuple[int, str]]


def _statement(release: Standing, files: Files) -> Mapping[str, Any]:
    try:
        statement = json.loads(release.read(PROVENANCE)) if PROVENANCE in files else None
    except ValueError:
        statement = None
    if not isinstance(statement, dict) or statement.get("_type") != "https://in-toto.io/Statement/v1":
        raise Refused(
            f"{release.where}: {PROVENANCE}",
            found="not there" if PROVENANCE not in files else "no in-toto statement",
            expected="the provenance that every release of mergegate has",
            remedy="it is no release of mergegate, or not all of one: get it again from where it was published",
        )
    return statement


def _against_sums(release: Standing, files: Files) -> list[str]:
    if SUMS not in files:
        return [f"{SUMS}: missing"]
    text = release.read(SUMS).decode(errors="replace")
    findings = _differences(
        parse_sums(text), {name: sha256 for name, (_, sha256) in files.items() if name != SUMS}, SUMS
    )
    if not findings and text != sums_text(parse_sums(text)):
        return [f"{SUMS}: not as it was written"]
    return findings


def _against_version(release: Standing, files: Files) -> list[str]:
    if release.version is None or (content := version_of(files)) == release.version:
        return []
    return [f"its version is {release.version}, its content is {content}"]


def _against_subjects(files: Files, statement: Mapping[str, Any]) -> list[str]:
    said = {
        str(_at(subject, "name")): str(_at(subject, "digest", "sha256")) for subject in _list(_at(statement, "subject"))
    }
    outside = {PROVENANCE, SIGNATURE, SUMS}
    return _differences(said, {name: sha256 for name, (_, sha256) in files.items() if name not in outside}, PROVENANCE)


def _against_texts(release: Standing, files: Files, statement: Mapping[str, Any]) -> list[str]:
    if not {RECIPE, CARD} <= set(files):
        return []  # said already: they are missing
    recipe, card = (release.read(name).decode(errors="replace") for name in (RECIPE, CARD))
    build = _at(statement, "predicate", "buildDefinition")
    findings = []
    try:
        documents: object = json.loads(json.dumps(list(yaml.safe_load_all(recipe))))
    except (yaml.YAMLError, TypeError):
        documents = None
    if documents != _at(build, "externalParameters", "recipe"):
        findings.append(f"{PROVENANCE}: its recipe is not that of {RECIPE}")
    if recipe.strip() not in card:
        findings.append(f"{CARD}: its recipe is not that of {RECIPE}")
    for parent in _list(_at(build, "resolvedDependencies")):
        digest = str(_at(parent, "digest", "gitCommit") or str(_at(parent, "digest", "mergegateCheckpoint"))[:16])
        if f"| {_at(parent, 'name')} |" not in card or digest not in card:
            findings.append(f"{CARD}: does not name the parent {_at(parent, 'name')} of {PROVENANCE}")
    return findings


def _against_signature(release: Standing, files: Files, key: Path | None) -> list[str]:
    if SIGNATURE not in files:
        return [f"{SIGNATURE}: missing; it is not signed"] if key else []
    envelope = release.read(SIGNATURE)
    if signed_statement(envelope) != release.read(PROVENANCE):
        return [f"{SIGNATURE}: signs something else than {PROVENANCE}"]
    if key and not is_signed_by(envelope, key):
        return [f"{SIGNATURE}: not signed with the key {key.name}"]
    return []


def _differences(said: Mapping[str, str], found: Mapping[str, str], by: str) -> list[str]:
    """What ``by`` says of the files (name -> sha256), beside what they are."""
    return [
        f"{name}: missing, though {by} lists it"
        if name not in found
        else f"{name}: not listed by {by}"
        if name not in said
        else f"{name}: sha256 is {found[name][:12]}…, {by} says {said[name][:12]}…"
        for name in sorted({*said, *found})
        if said.get(name) != found.get(name)
    ]


def _at(value: object, *path: str) -> Any:
    """What lies at ``path`` in plain data; None where there is no such place."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
