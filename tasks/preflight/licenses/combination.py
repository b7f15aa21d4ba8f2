"""Combine licenses: derive a verdict with reasons, a license and obligations from the parents and an intended use.

    combine_licenses([table.lookup("llama3.1"), table.lookup("apache-2.0")], use, table).status     # "allowed"

The functions are pure. Neither order nor repetition of the parents matters, and adding a parent never improves the
status. The rules are in rules.py, and the facts in table.yaml. A permitted merge has consequences: its license (R7) and
the obligations to fulfill (R8, R9).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel

from mergegate.tasks.preflight.licenses.rules import (
    RULES,
    SEVERITY,
    Case,
    LicensedParent,
    LicenseStatus,
    Subject,
    Use,
    join_words,
    share_alike_licenses,
)
from mergegate.tasks.preflight.licenses.table import OTHER, UNKNOWN, WEAK_KINDS, License, LicenseTable

ObligationKind = Literal["text", "notice", "display", "use_policy", "changes", "name_prefix", "cap"]


class Reason(BaseModel, frozen=True, extra="forbid"):
    """Result of one rule."""

    rule: str  # Number and subject: `R2: commercial use`.
    status: LicenseStatus  # Status after acceptance; an accepted review is `allowed`.
    sentence: str  # Explanation that names the licenses and their models.
    remedy: str = ""  # Advice to the user; empty for `allowed`.
    # Subjects that a user must accept, each by license or by model, to settle a review.
    about: tuple[Subject, ...] = ()
    # Acceptances with user and reason, one per required key: `llama3.2: alice: text-only model`.
    accepted: tuple[str, ...] = ()


class Obligation(BaseModel, frozen=True, extra="forbid"):
    """Obligation for the merged model."""

    # `text`: ship a license text. `notice`: put `text` verbatim into the NOTICE file. `display`: put `text` verbatim
    # into the card and the product. `use_policy`: pass use restrictions on. `changes`: state that files were modified.
    # `name_prefix`: begin the name with `text`. `cap`: get a separate license beyond a threshold.
    kind: ObligationKind
    text: str  # Wording to reproduce (notice, display, name_prefix). For the other kinds, the action in words.
    because: tuple[str, ...]  # Identifiers of the licenses that require it, sorted.
    model: str | None = None  # Model whose own license file must be shipped, because its license text is unknown.


class Combination(BaseModel, frozen=True, extra="forbid"):
    """License verdict on a merge."""

    # Most severe status of all reasons. `review` stops a release as `blocked` does, but a user can accept it.
    status: LicenseStatus
    license: str | None  # Value for `license` in the model card: an identifier of the Hub or `other`; None if blocked.
    license_name: str | None  # Name that goes with `other`.
    # Identifiers of all licenses of the weights, whose texts are in the file `LICENSE`; empty if blocked.
    licenses: tuple[str, ...]
    card: dict[str, str]  # License fields of the model card; empty if blocked.
    obligations: tuple[Obligation, ...]  # Obligations for the merged model.
    reasons: tuple[Reason, ...]  # Results of all rules, most severe first.

    @property
    def acceptances(self) -> tuple[str, ...]:
        """All acceptances that the verdict relies on."""
        return tuple(sorted({acceptance for reason in self.reasons for acceptance in reason.accepted}))


def combine_licenses(
    parents: Sequence[License | LicensedParent],
    use: Use,
    table: LicenseTable,
    acceptances: Mapping[str, str] = MappingProxyType({}),
) -> Combination:
    """Determine whether the licenses of the parents allow a merge for the intended use.

    Args:
        parents: All models whose weights enter the merge, including adapters and the base. The licenses of their
            ancestors apply too. A bare ``License`` stands for a parent that has the license's name.
        use: Intended use of the merged model.
        table: Known licenses.
        acceptances: Texts of the form ``who: why`` from the user, by license identifier or model name.
            See ``LicenseSettings.accepted``.
    """
    if not parents:
        raise ValueError("a merge needs at least one parent")
    case = Case.create(parents, use, table)
    reasons = set()
    for rule, finding in [(judged, finding) for judged in RULES for finding in judged.judge(case)]:
        settled: tuple[str, ...] = ()
        remedy = rule.remedy
        if finding.status == "review":  # It is settled if all of its subjects are accepted. A block never is.
            keys = [
                next((key for key in (subject.license, subject.model) if key is not None and key in acceptances), None)
                for subject in finding.about
            ]
            if keys and None not in keys:
                settled = tuple(sorted({f"{key}: {acceptances[key]}" for key in keys if key is not None}))
            names = sorted({subject.license or subject.model for subject in finding.about})
            to_accept = join_words(f"{name!r}" for name in names)
            remedy = (
                f"{rule.remedy}; to accept, add {to_accept} under 'accepted' of checks.license, for example "
                f"accepted: {{{names[0]}: 'YOUR NAME: YOUR REASON'}}"
            )
        status: LicenseStatus = "allowed" if settled else finding.status
        reasons.add(
            Reason(
                rule=f"{rule.id}: {rule.subject}",
                status=status,
                sentence=finding.sentence,
                remedy=remedy if status != "allowed" else "",
                about=finding.about,
                accepted=settled,
            )
        )
    status = max((reason.status for reason in reasons), key=SEVERITY.__getitem__, default="allowed")
    named: dict[str, Any] = {"licenses": (), "license": None, "license_name": None, "card": {}}
    if status != "blocked":
        licenses, sentence = resulting_licenses(case)
        named = {"licenses": licenses, **_name_licenses(licenses, table)}
        reasons.add(Reason(rule="R7: license of the merge", status="allowed", sentence=sentence))
    return Combination(
        status=status,
        **named,
        obligations=obligations(case),
        reasons=tuple(sorted(reasons, key=lambda reason: (-SEVERITY[reason.status], reason.rule, reason.sentence))),
    )


def resulting_licenses(case: Case) -> tuple[tuple[str, ...], str]:
    """Return the identifiers of the merge's licenses (R7), and the reason for them.

    A share-alike license decides. Without one, all licenses that the merge must keep apply: a single license directly,
    several as a bundle. If there are none of these either, the strongest permissive license applies.
    """
    if fits := share_alike_licenses(case):
        parents_licenses = [key for key in fits if key in {entry.id for entry in case.known_licenses}]
        license = (parents_licenses or list(fits))[0]
        return (license,), f"share-alike: the merged weights stay under {license}"
    # Weights under a weak license may carry another license, with the text and the credit of the weak one.
    staying = tuple(entry.id for entry in case.known_licenses if entry.kind not in WEAK_KINDS or entry.restrictive)
    if not staying and not case.unknown_licenses:
        strongest = max(case.known_licenses, key=lambda entry: _strength(case, entry))
        return (strongest.id,), f"{strongest.id} is the strongest of the permissive licenses"
    # `other` means nothing without a name, so it becomes `unknown`.
    bundle = tuple(sorted({*staying, *(UNKNOWN if key == OTHER else key for key in case.unknown_licenses)}))
    each = "" if len(bundle) == 1 else "each of "
    return bundle, f"the merged weights stay under {each}{join_words(bundle)}"


def _strength(case: Case, entry: License) -> tuple[int, bool, bool, int]:
    """Rank attribution over permissive over public domain; then patent terms, marking of changes, and table order."""
    rank = WEAK_KINDS.index(entry.kind)
    return rank, bool(entry.never_under), entry.state_changes, -list(case.table.licenses).index(entry.id)


def _name_licenses(ids: tuple[str, ...], table: LicenseTable) -> dict[str, Any]:
    """Return the fields of a combination that name its licenses. A linked file `LICENSE` contains all texts."""
    if len(ids) == 1 and table.licenses[ids[0]].hub:
        return {"license": ids[0], "license_name": None, "card": {"license": ids[0]}}
    # A file name or a URL may contain the name, so only letters, digits, dots and hyphens are allowed.
    name = "-and-".join(re.sub(r"[^a-z0-9.-]+", "-", key.lower().replace("+", "plus")) for key in ids)
    fields = {"license": OTHER, "license_name": name}
    return {**fields, "card": {**fields, "license_link": "LICENSE"}}


def obligations(case: Case) -> tuple[Obligation, ...]:
    """Return the obligations that the licenses impose (R8 and R9), each once, sorted by kind and text."""
    license_ids: dict[tuple[ObligationKind, str, str | None], set[str]] = {}
    for entry in case.known_licenses:
        credit = f"Made with {join_words(case.names(entry))}, licensed under {entry.spdx or entry.id}."
        policy = case.table.policies[entry.use_policy] if entry.use_policy else ""
        terms: tuple[tuple[ObligationKind, str, object], ...] = (
            ("text", f"ship the text of {entry.id}", entry.text),
            ("notice", credit, entry.credit),
            ("notice", entry.notice or "", entry.notice),
            ("display", (entry.display or "").replace("[name]", case.use.name.rsplit("/", 1)[-1]), entry.display),
            ("use_policy", f"pass on the use restrictions of {entry.id}: {policy}", entry.use_policy),
            ("changes", "state that the files were modified", entry.state_changes),
            ("name_prefix", entry.name_prefix or "", entry.name_prefix),
            (
                "cap",
                f"{entry.id}: commercial use has a threshold: {entry.cap or 'ask the licensor first'}",
                entry.commercial == "capped",
            ),
        )
        for kind, text in ((kind, text) for kind, text, applies in terms if applies):
            license_ids.setdefault((kind, text, None), set()).add(entry.id)
    for model in case.models:
        if not model.license.resolved:
            text = f"ship the license file that comes with {model.name}"
            license_ids.setdefault(("text", text, model.name), set()).add(model.license.id)
    result = [
        Obligation(kind=kind, text=text, because=tuple(sorted(ids)), model=model)
        for (kind, text, model), ids in license_ids.items()
    ]
    return tuple(sorted(result, key=lambda obligation: (obligation.kind, obligation.text)))
