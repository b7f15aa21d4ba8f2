"""Verify a release: compare its files with every statement about them, and the statements with each other.

The following changes to a release are detected:

* a changed byte, a missing or an added file, even a special one (a link, a pipe): by SHA256SUMS, and by the file lists
  of the provenance, the bill of materials and the signature;
* an edited provenance: by SHA256SUMS, which lists it, and by the recipe, card, bill of materials and files, which must
  agree with it;
* a provenance and SHA256SUMS that were edited consistently: by the version, if that is a content hash, because users
  know it as the name of the directory or tag;
* a complete rebuild under another version: only by a signature, verified with a key or for an identity from another
  channel.

The files and statements that a release must have depend on ``buildType`` in its provenance. That of a merge has a
recipe, and a card that names the parents. That of quantized variants has one verdict and the files of each variant, and
names the release of the merge, which is verified, too, if it is available.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import parse_yaml
from mergegate.tasks.base.store import merkle
from mergegate.tasks.merge import WeightComparison
from mergegate.tasks.models.checkpoints import parse_card
from mergegate.tasks.release.publish.content import (
    BOM,
    CARD,
    DOCUMENTS,
    EVAL_RESULTS,
    FACTS,
    KEYLESS_SIGNATURE,
    MERGE_BUILD,
    MODIFICATIONS,
    PROVENANCE,
    RECIPE,
    RELEASE_URN,
    SIGNATURE,
    STATEMENT_OF_CHANGES,
    STATEMENT_TYPES,
    SUMS,
    VARIANT_BUILD,
    VARIANT_VERDICTS,
    VERSION_DIGITS,
    checksums_text,
    content_digest,
    is_rebuilt,
    parse_checksums,
    read_document,
)
from mergegate.tasks.release.publish.documents.bom import MISSING_FACT
from mergegate.tasks.release.publish.releases.origin import MergeLink, find_merge, read_link, require_linked
from mergegate.tasks.release.publish.releases.recompute import (
    RecomputedVerdict,
    compare_documents,
    recompute_variants,
    recompute_verdict,
)
from mergegate.tasks.release.publish.signing import Signer, SignerPolicy, public_key, read_keyless, read_signature
from mergegate.tasks.release.publish.targets import PublishedRelease

Signed = Literal["valid", "not checked", "none"]
Files = Mapping[str, tuple[int, str]]
"""Size in bytes and sha256 of each file, by name."""
_SIGNATURES: Mapping[Signed, str] = {
    "valid": "the signature is valid",
    "not checked": "it is signed; pass the public key (--key) to check the signature",
    "none": "it is not signed",
}
_UNLISTED = frozenset({SIGNATURE, KEYLESS_SIGNATURE})  # written after SHA256SUMS, so no other file lists them
_FACTS_AT_RISK = (
    "weights, tokenizer and configuration (mergegate reproduce rebuilds them)",
    "names, licenses, cards and license texts of the parents",
    "statements of the publisher",
    "estimates of computation and energy",
    "recorded versions, seeds and devices",
    "settings and data of the evaluation, and the outcomes of its documents",
    "verdicts of a judge or a server, and checks of a conversion",
    "sections of the report about attempts, distances, experts and explanations",
    "whether a newer release exists",
)
_NO_DIGEST = "its name is not a digest, so it is compared only with its own records"


@dataclass(frozen=True)
class KeylessSignatureState:
    """Keyless signature of a release, which covers exactly its files."""

    # Whether certificate, log entry and signer are ``valid``, or ``not checked``
    status: Literal["valid", "not checked"]
    signer: Signer  # identity and issuer in the certificate. They are only a claim unless ``status`` is ``valid``.

    def __str__(self) -> str:
        if self.status == "valid":
            return f"the keyless signature is valid: signed by {self.signer}"
        return (
            f"it has a keyless signature that claims to be by {self.signer}; pass the signer that you expect "
            "(--identity and --issuer) to check it"
        )


@dataclass(frozen=True)
class VerifiedRelease:
    """A release whose files and statements agree."""

    reference: str  # directory or URL of the release
    listing: Files  # size and sha256 of each file
    version: str | None  # version of the release. None unless its name is a content hash.
    signed: Signed  # whether the signature with a key is ``valid`` or ``not checked``, or ``none`` if there is none
    statement: Mapping[str, Any]  # provenance of the release, an in-toto statement
    # Verdict that was decided again from the release of a merge. None unless that was requested.
    recomputed: RecomputedVerdict | None = None
    # Verdicts that were decided again from a release of quantized variants, by type. Empty unless that was requested.
    variants: Mapping[str, RecomputedVerdict] = field(default_factory=dict)
    merge: MergeLink | None = None  # release that quantized variants were made from. None for the release of a merge.
    keyless: KeylessSignatureState | None = None  # state of the keyless signature. None if there is none.
    missing_facts: tuple[str, ...] = ()  # facts that the bill of materials lists as missing
    documents: str = ""  # result of writing the documents again, as a sentence. Empty unless that was requested.

    @property
    def facts_at_risk(self) -> tuple[str, ...]:
        """Facts that only a valid signature protects from a consistent change. Empty if there is one."""
        is_signed = self.signed == "valid" or (self.keyless is not None and self.keyless.status == "valid")
        return () if is_signed else _FACTS_AT_RISK

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self.listing)

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(size for size, _ in self.listing.values())

    @property
    def state(self) -> str:
        """Result of the verification: 'all as published' if a signature is valid."""
        is_unsigned = self.signed == "none" and self.keyless is None
        result = f"consistent; {'unsigned' if is_unsigned else 'signature not checked'}"
        return result if self.facts_at_risk else "all as published"

    def __str__(self) -> str:
        head = f"{self.reference}: {self.files} files, {self.bytes / 1e6:,.1f} MB, {self.state}"
        lines = [f"its content matches its version {self.version}" if self.version else _NO_DIGEST]
        lines += [_SIGNATURES[self.signed]] if self.signed != "none" or not self.keyless else []
        lines += [str(part) for part in (self.keyless, self.merge) if part]
        if self.missing_facts:
            lines.append(f"its bill of materials lists {len(self.missing_facts)} missing facts, see {BOM}")
        lines += [self.documents] if self.documents else []
        if self.facts_at_risk:
            lines.append("only a valid signature shows that these are unchanged:")
            lines += [f"  * {subject}" for subject in self.facts_at_risk]
        else:
            lines.append("a signature does not show whether a newer release exists")
        return "\n  ".join((head, *lines))


def check_release(
    release: PublishedRelease,
    key: Path | None = None,
    *,
    recompute: bool = False,
    merge: str | None = None,
    signer: SignerPolicy | None = None,
) -> VerifiedRelease:
    """Verify all files and statements of a release, and the merge's release if it is one of variants.

    Args:
        release: The release.
        key: Public key (ECDSA, PEM) that must have signed the release. None: the signature is not verified.
        recompute: Whether to recompute the verdicts from the outcomes in the release. Default: false.
        merge: Reference to the release of the merge that variants were quantized from. None: mergegate looks next to
            the release.
        signer: Signer that must have created the keyless signature. None: the keyless signature is not verified.

    Raises:
        Refused: Files or statements disagree, a verdict does not follow from the outcomes, or the merge's release is
            another one. The message lists every finding.
        InvalidInput: ``key`` is not a public key, ``signer`` cannot be verified on this machine, a verdict cannot be
            recomputed, or there is no release at ``merge``.
    """
    check = _open_check(release)
    if key is not None:
        public_key(key)  # report an invalid key first, even if the release is not signed
    if merge is not None and isinstance(check, _MergeCheck):
        raise InvalidInput(
            "--merge",
            found=f"{release.reference} is itself the release of a merge",
            expected="a release of quantized variants",
            remedy="omit --merge",
        )
    check.compare_all(key, signer)
    check.require_no_findings()
    signed: Signed = "none" if SIGNATURE not in check.files else "valid" if key else "not checked"
    keyless = None
    if check.claimed_signer:
        keyless = KeylessSignatureState("valid" if signer else "not checked", check.claimed_signer)
    verified = VerifiedRelease(
        release.reference,
        check.files,
        release.version,
        signed,
        check.statement,
        keyless=keyless,
        missing_facts=check.missing_facts(),
    )
    if isinstance(check, _VariantCheck) and check.link:
        link = find_merge(release, check.link, merge)
        if not isinstance(link, MergeLink):
            verified_merge = check_release(link, key, signer=signer)
            require_linked(check.link, link, verified_merge.statement)
            link = replace(check.link, reference=link.reference)
        verified = replace(verified, merge=link)
    if recompute:
        inputs = (release, check.files, check.statement)
        if isinstance(check, _VariantCheck):
            verified = replace(verified, variants=recompute_variants(*inputs))
        else:
            verified = replace(verified, recomputed=recompute_verdict(*inputs))
        check.findings, documents = compare_documents(*inputs)
        check.require_no_findings()
        verified = replace(verified, documents=documents)
    return verified


class _ReleaseCheck:
    """Comparisons of one release, which add to ``findings``. A subclass adds the comparisons of one kind of release."""

    required: ClassVar[frozenset[str]] = frozenset({CARD})
    origin: ClassVar[str] = "parents"  # of the release, for messages

    def __init__(self, release: PublishedRelease, files: Files, statement: Mapping[str, Any]) -> None:
        self.release, self.files, self.statement = release, files, statement
        self.findings: list[str] = []
        self.claimed_signer: Signer | None = None  # of the keyless signature
        dependencies = _list(_at(statement, "predicate", "buildDefinition", "resolvedDependencies"))
        self.dependencies = dependencies
        self.parents = [item for item in dependencies if _at(item, "annotations", "role") != "text"]

    def compare_all(self, key: Path | None, signer: SignerPolicy | None) -> None:
        """Make every comparison. ``key`` and ``signer`` must have signed the release; None: not verified."""
        if SUMS in self.files:
            text = self.text(SUMS)
            # Signatures are written last and cover SHA256SUMS, so SHA256SUMS cannot list them.
            is_equal = self.compare_files(parse_checksums(text).items(), SUMS, unlisted_files={SUMS, *_UNLISTED})
            if is_equal and text != checksums_text(parse_checksums(text)):
                self.findings.append(f"{SUMS}: not in the form that mergegate writes")
        else:
            self.findings.append(f"{SUMS}: missing")
        content = content_digest(self.files)[:VERSION_DIGITS]
        # A bucket records the digest over all files for a release with a name.
        if self.release.version not in (None, content, merkle(self.files)[:VERSION_DIGITS]):
            self.findings.append(f"its version is {self.release.version}, its content is {content}")
        self.compare_statements()
        reported = {finding.partition(":")[0] for finding in self.findings}
        self.findings += [f"{name}: missing" for name in sorted(self.required - set(self.files) - reported)]
        if self.required <= set(self.files):
            self.compare_card(self.text(CARD), parse_card(self.read(CARD)).fields)
        if SIGNATURE in self.files:
            try:
                signature = read_signature(self.read(SIGNATURE))
            except ValueError as error:
                self.findings.append(f"{SIGNATURE}: {error}")
            else:
                self.compare_files(signature.files.items(), SIGNATURE, unlisted_files=_UNLISTED)
                if key and not signature.matches_key(key):
                    self.findings.append(f"{SIGNATURE}: not signed with the key {key.name}")
        elif key is not None:
            self.findings.append(f"{SIGNATURE}: missing; the release is not signed")
        if KEYLESS_SIGNATURE in self.files:
            try:
                keyless = read_keyless(self.read(KEYLESS_SIGNATURE))
                self.claimed_signer = keyless.signer
                self.compare_files(keyless.files.items(), KEYLESS_SIGNATURE, unlisted_files={KEYLESS_SIGNATURE})
                if signer is not None:
                    keyless.require_signer(signer)
            except ValueError as error:
                self.findings.append(f"{KEYLESS_SIGNATURE}: {error}")
        elif signer is not None:
            self.findings.append(f"{KEYLESS_SIGNATURE}: missing; expected a keyless signature by {signer.signer}")

    def compare_statements(self) -> None:
        """Compare provenance and bill of materials with the files and each other."""
        listed = [
            (str(_at(subject, "name")), str(_at(subject, "digest", "sha256")))
            for subject in _list(_at(self.statement, "subject"))
        ]
        self.require_distinct(PROVENANCE, [str(_at(parent, "name")) for parent in self.dependencies])
        self.compare_files(listed, PROVENANCE, unlisted_files={PROVENANCE, SUMS, *_UNLISTED})
        self.compare_facts()
        if BOM not in self.files:
            return
        bom = self._json(BOM)
        components = _list(_at(bom, "components"))
        listed = [
            (str(_at(component, "name")), str(_at(digest, "content")))
            for component in components
            for digest in _list(_at(component, "hashes")) or [None] * (_at(component, "type") == "file")
        ]
        self.require_distinct(BOM, [str(_at(component, "bom-ref")) for component in components])
        self.compare_files(listed, BOM, unlisted_files={BOM, PROVENANCE, SUMS, *_UNLISTED})
        ancestors = [
            (_at(item, "name"), _at(item, "version"))
            for item in _list(_at(bom, "metadata", "component", "pedigree", "ancestors"))
        ]
        parents = [
            (_at(item, "name"), _at(item, "digest", "gitCommit") or _at(item, "digest", "sha256"))
            for item in self.parents
        ]
        if ancestors != parents:
            self.findings.append(f"{BOM}: its {self.origin} are not those of {PROVENANCE}")

    def compare_facts(self) -> None:
        """Compare all files except documents with the recorded facts, which earlier releases lack."""
        if FACTS not in self.files:
            return
        listed = _at(self._json(FACTS), "files")
        files = {str(name): str(sha256) for name, sha256 in listed.items()} if isinstance(listed, dict) else {}
        results = {name for name in self.files if name.startswith(EVAL_RESULTS)}
        self.compare_files(files.items(), FACTS, unlisted_files={FACTS, *results, *DOCUMENTS, SUMS, *_UNLISTED})

    def require_no_findings(self) -> None:
        """Raise Refused with all findings, if there are any."""
        if self.findings:
            first, *more = dict.fromkeys(self.findings)
            raise Refused(
                self.release.reference,
                found="\n  also: ".join((first, *more)),
                expected="a release whose files are as published and agree with each other",
                remedy="do not use it; download it again from its target, or publish it again",
            )

    def missing_facts(self) -> tuple[str, ...]:
        properties = _list(_at(self._json(BOM), "metadata", "properties")) if BOM in self.files else []
        return tuple(str(_at(item, "value")) for item in properties if _at(item, "name") == MISSING_FACT)

    def compare_card(self, card: str, metadata: Mapping[str, Any]) -> None:
        """Compare text and metadata of the card with the provenance."""
        stated = _at(self.statement, "predicate", "mergegate_card")
        if metadata != stated:
            both = {**metadata, **(stated if isinstance(stated, dict) else {})}
            differences = ", ".join(name for name in both if _at(metadata, name) != _at(stated, name))
            detail = differences or "none can be read"
            self.findings.append(f"{CARD}: its metadata is not that of {PROVENANCE} ({detail})")
        if (_at(metadata, "base_model") or []) not in self.base_models():
            self.findings.append(f"{CARD}: its base_model differs from the {self.origin} in {PROVENANCE}")
        license = _at(self.statement, "predicate", "mergegate_licence", "card")
        if not isinstance(license, dict) or any(_at(metadata, name) != value for name, value in license.items()):
            self.findings.append(f"{CARD}: its license is not that of {PROVENANCE}")

    def base_models(self) -> Sequence[list[str]]:
        """Return the lists of Hub ids that the card may have as ``base_model``."""
        raise NotImplementedError

    def require_distinct(self, source: str, entries: Iterable[str]) -> None:
        """Require that the list in ``source`` names nothing twice, because each reader may take another entry."""
        counts = Counter(entries)
        self.findings += [f"{source}: duplicate entry {name!r:.80}" for name in sorted(counts) if counts[name] > 1]

    def compare_files(self, file_list: Iterable[tuple[str, str]], source: str, unlisted_files: Collection[str]) -> bool:
        """Compare the files with the list in ``source`` (name and sha256), and return whether they are equal.

        ``unlisted_files`` are written after ``source``, so it cannot list them.
        """
        entries = list(file_list)
        self.require_distinct(source, [name for name, _ in entries])
        listed_digests = dict(entries)
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
        """Return the content of a JSON file, or None and a finding if it cannot be parsed."""
        try:
            return read_document(self.read(name), name)
        except InvalidInput as error:
            self.findings.append(f"{name}: {error.found}")
            return None

    def read(self, name: str) -> bytes:
        """Return the content of a file, or empty bytes for a special file, which the lists of files report."""
        try:
            return self.release.read(name)
        except InvalidInput:
            return b""

    def text(self, name: str) -> str:
        return self.read(name).decode(errors="replace")


class _MergeCheck(_ReleaseCheck):
    """Comparisons of the release of a merge with its recipe and its parents."""

    required = frozenset({CARD, RECIPE})

    def compare_statements(self) -> None:
        super().compare_statements()
        if RECIPE not in self.files:
            return
        try:
            documents: object = parse_yaml(self.text(RECIPE), RECIPE)
        except InvalidInput:
            documents = None
        if documents != _at(self.statement, "predicate", "buildDefinition", "externalParameters", "recipe"):
            self.findings.append(f"{PROVENANCE}: its recipe is not that of {RECIPE}")

    def compare_card(self, card: str, metadata: Mapping[str, Any]) -> None:
        super().compare_card(card, metadata)
        if self.text(RECIPE).strip() not in card:
            self.findings.append(f"{CARD}: its recipe is not that of {RECIPE}")
        shown = _displayed(card)
        for parent in self.parents:
            name = _one_line(str(_at(parent, "name")))
            digest = str(_at(parent, "digest", "gitCommit") or str(_at(parent, "digest", "sha256"))[:16])
            if f"| {name} |" not in shown or digest not in shown:
                self.findings.append(f"{CARD}: does not name the parent {name} of {PROVENANCE}")
        if (weights := _at(self.statement, "predicate", "mergegate_weights")) is not None:
            self._compare_changes(weights, _displayed(card.partition(STATEMENT_OF_CHANGES)[2]))

    def _compare_changes(self, weights: object, card: str) -> None:
        """Compare the figures in the statements of changes with the provenance. Their words depend on the version.

        ``card`` is the text of the card after ``STATEMENT_OF_CHANGES``.
        """
        names = [_one_line(str(_at(parent, "name"))) for parent in self.parents]
        try:
            figures = WeightComparison.model_validate(weights).figures(names)
        except (ValidationError, IndexError):
            self.findings.append(f"{PROVENANCE}: mergegate_weights is not a comparison with its {self.origin}")
            return
        # The file, in contrast to the card, lists all models first.
        statements = {CARD: (card, figures)}
        if MODIFICATIONS in self.files:
            statements[MODIFICATIONS] = (_one_line(self.text(MODIFICATIONS)), (*names, *figures))
        self.findings += [
            f"{name}: its statement of changes is not that of {PROVENANCE}"
            for name, (text, expected) in statements.items()
            if not _states(text, expected)
        ]

    def base_models(self) -> Sequence[list[str]]:
        models, with_adapters = list[str](), list[str]()
        for parent in self.parents:
            adapter = _at(parent, "annotations", "adapter")
            if _at(parent, "annotations", "contributes") is False:
                continue
            if _at(parent, "digest", "gitCommit"):
                models.append(str(_at(parent, "uri")).removeprefix("pkg:huggingface/").rpartition("@")[0])
                with_adapters.append(models[-1])
            if _at(adapter, "gitCommit"):
                with_adapters.append(str(_at(adapter, "name")).partition("@")[0])
        # An adapter, and a merge by an earlier version of mergegate, does not name the adapters of its parents.
        return [list(dict.fromkeys(ids)) for ids in (with_adapters, models)]


class _VariantCheck(_ReleaseCheck):
    """Comparisons of a release of quantized variants with its verdicts and the release of the merge."""

    origin = "ancestors"

    def __init__(self, release: PublishedRelease, files: Files, statement: Mapping[str, Any]) -> None:
        super().__init__(release, files, statement)
        self.link = read_link(statement)

    def compare_statements(self) -> None:
        """Compare the verdicts with the files: a variant is published if and only if its verdict allows it."""
        super().compare_statements()
        if self.link is None:
            self.findings.append(f"{PROVENANCE}: it does not name the release of the merge as its only dependency")
        elif _at(self.parents[0] if self.parents else None, "uri") != f"{RELEASE_URN}{self.link.sums}":
            self.findings.append(f"{PROVENANCE}: the address and the digest of its dependency differ")
        published = _at(self.statement, "predicate", "buildDefinition", "internalParameters", "variants")
        published = published if isinstance(published, dict) else {}
        stated = _list(_at(self.statement, "predicate", VARIANT_VERDICTS))
        self.require_distinct(PROVENANCE, [str(_at(verdict, "type")) for verdict in stated])
        verdicts = {str(_at(verdict, "type")): _at(verdict, "publishable") is True for verdict in stated}
        owned: set[str] = set()
        for variant_type, facts in sorted(published.items()):
            if not verdicts.get(variant_type):
                self.findings.append(f"{PROVENANCE}: it has files of {variant_type}, but no verdict that allows them")
            for name in map(str, _list(_at(facts, "files"))):
                if name not in self.files:
                    self.findings.append(f"{name}: missing, though {PROVENANCE} lists it for {variant_type}")
                owned.add(name)
            if not any(is_rebuilt(str(name)) for name in _list(_at(facts, "files"))):
                self.findings.append(f"{PROVENANCE}: it has no weights of {variant_type}")
        for variant_type in sorted(name for name, passed in verdicts.items() if passed and name not in published):
            self.findings.append(f"{PROVENANCE}: its verdict allows {variant_type}, but no file is one of it")
        for name in sorted(name for name in self.files if is_rebuilt(name) and name not in owned):
            self.findings.append(f"{name}: {PROVENANCE} does not say which variant it is")

    def compare_card(self, card: str, metadata: Mapping[str, Any]) -> None:
        super().compare_card(card, metadata)
        if self.link and self.link.version not in card:
            self.findings.append(f"{CARD}: does not name the merge {self.link.name} {self.link.version}")
        if _at(metadata, "base_model") and _at(metadata, "base_model_relation") != "quantized":
            self.findings.append(f"{CARD}: its base_model_relation is not 'quantized'")

    def base_models(self) -> Sequence[list[str]]:
        return ([self.link.hub_id] if self.link and self.link.hub_id else [],)


_KINDS: Mapping[object, type[_ReleaseCheck]] = {MERGE_BUILD: _MergeCheck, VARIANT_BUILD: _VariantCheck}
"""Comparisons of each kind of release, by the ``buildType`` of its provenance."""


def _open_check(release: PublishedRelease) -> _ReleaseCheck:
    """Return the comparisons for the kind of ``release``. Raise Refused if its provenance does not tell the kind."""
    files = release.files()
    statement: dict[str, Any] = {}
    found = "not an in-toto statement with SLSA provenance" if PROVENANCE in files else "the file is missing"
    if PROVENANCE in files:
        try:
            statement = read_document(release.read(PROVENANCE), PROVENANCE)
        except InvalidInput as error:
            found = error.found
    if (statement.get("_type"), statement.get("predicateType")) != STATEMENT_TYPES:
        raise Refused(
            f"{release.reference}: {PROVENANCE}",
            found=found,
            expected="the provenance that every release of mergegate has",
            remedy="this is not a complete release of mergegate; download it again from its target",
        )
    build = _at(statement, "predicate", "buildDefinition", "buildType")
    kind = _KINDS.get(build) if isinstance(build, str) else None
    if kind is None:
        raise Refused(
            f"{release.reference}: {PROVENANCE}: buildType",
            found=f"{build!r:.80}",
            expected=" or ".join(map(str, _KINDS)),
            remedy="download the release again, or verify it with a newer mergegate",
        )
    return kind(release, files, statement)


def _states(text: str, figures: Sequence[str]) -> bool:
    """Return whether ``text`` states ``figures`` in this order, without another number before or between them."""
    # Atomic groups, so that the time is linear in the text for any names in a provenance.
    return re.match("".join(rf"(?>\D*?{re.escape(figure)}(?!\w|[.,]\d))" for figure in figures), text) is not None


def _displayed(markdown: str) -> str:
    """Return Markdown as one line without the backslashes that escape punctuation."""
    return _one_line(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", markdown))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _at(value: object, *path: str) -> Any:
    """Return the value at ``path`` in plain data, or None if there is no such key."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
