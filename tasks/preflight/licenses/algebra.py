"""License algebra: derive a verdict with reasons, a license and obligations from the parents and an intended use.

    combine_licenses([table.lookup("llama3.1"), table.lookup("apache-2.0")], use, table).status     # "allowed"

The functions are pure. Neither order nor repetition of the parents matters, and adding a parent never improves the
status. The rules are in rules.py, the consequences for the release in resulting_license.py, and the facts in
table.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.preflight.licenses.case import SEVERITY, Case, LicensedParent, LicenseStatus, Subject, join_words
from mergegate.tasks.preflight.licenses.resulting_license import Obligation, obligations, resulting_license
from mergegate.tasks.preflight.licenses.rules import RULES
from mergegate.tasks.preflight.licenses.settings import Use
from mergegate.tasks.preflight.licenses.table import License, LicenseTable


class Reason(BaseModel):
    """Result of one rule.

    Attributes:
        rule: Number and subject: `R2: commercial use`.
        status: Status after acceptance; an accepted review is `allowed`.
        sentence: Explanation that names the licenses and their models.
        remedy: Advice to the user; empty for `allowed`.
        about: Subjects that a user must accept, each by license or by model, to settle a review.
        accepted: Acceptances with user and reason, one per required key: `llama3.2: alice: text-only model`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: str
    status: LicenseStatus
    sentence: str
    remedy: str = ""
    about: tuple[Subject, ...] = ()
    accepted: tuple[str, ...] = ()


class Combination(BaseModel):
    """License verdict on a merge.

    Attributes:
        status: Most severe status of all reasons. `review` stops a release as `blocked` does, but a user can accept it.
        license: Value for `license` in the model card: an identifier of the Hub or `other`; None if blocked.
        license_name: Name that goes with `other`.
        licenses: Identifiers of all licenses of the weights; empty if blocked.
        card: License fields of the model card; empty if blocked.
        obligations: Obligations for the merged model.
        reasons: Results of all rules, most severe first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: LicenseStatus
    license: str | None
    license_name: str | None
    licenses: tuple[str, ...]
    card: dict[str, str]
    obligations: tuple[Obligation, ...]
    reasons: tuple[Reason, ...]

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

    Returns:
        Verdict with its reasons, and the license and the obligations of the merged model.

    Raises:
        ValueError: There are no parents.
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
    result = None if status == "blocked" else resulting_license(case)
    if result is not None:
        reasons.add(Reason(rule="R7: license of the merge", status="allowed", sentence=result.sentence))
    return Combination(
        status=status,
        license=result.license if result else None,
        license_name=result.license_name if result else None,
        licenses=result.licenses if result else (),
        card=result.card if result else {},
        obligations=obligations(case),
        reasons=tuple(sorted(reasons, key=lambda reason: (-SEVERITY[reason.status], reason.rule, reason.sentence))),
    )
