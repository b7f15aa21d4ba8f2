"""The licence algebra: parents and an intended use in, a verdict with its reasons, a licence and obligations out.

    combine_licenses([table.lookup("llama3.1"), table.lookup("apache-2.0")], use, table).status     # "allowed"

Pure. Neither order nor repetition of the parents matters, and adding a parent never improves the status. The rules
stand in rules.py, what follows for the release in resulting_license.py, the facts in table.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.preflight.licenses.case import (
    Case,
    LicensedParent,
    LicenseFinding,
    LicenseStatus,
    Subject,
    listed,
    worst_status,
)
from mergegate.tasks.preflight.licenses.resulting_license import Obligation, obligations, resulting_license
from mergegate.tasks.preflight.licenses.rules import RULES, LicenseRule
from mergegate.tasks.preflight.licenses.table import License, LicenseTable
from mergegate.tasks.preflight.licenses.use import Use


class Reason(BaseModel):
    """What one rule says.

    Attributes:
        rule: Number and subject: `R2: commercial use`.
        status: After acceptance: an accepted review is `allowed`.
        sentence: In words, naming the licences and the models under them.
        remedy: What to do about it; empty for `allowed`.
        about: What must be accepted, each by licence or by model, to settle a review.
        accepted: Who accepted it and why, one entry per key that was needed: `llama3.2: alice: text-only model`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: str
    status: LicenseStatus
    sentence: str
    remedy: str = ""
    about: tuple[Subject, ...] = ()
    accepted: tuple[str, ...] = ()


class Combination(BaseModel):
    """The licence verdict over a merge.

    Attributes:
        status: The worst of all reasons. `review` stops a release as `blocked` does, but can be accepted by a person.
        license: Value for the card's `license`: an identifier of the Hub or `other`; None when blocked.
        license_name: Name beside `other`.
        licenses: Identifiers of all that the weights are under; empty when blocked.
        card: The licence fields of the model card; empty when blocked.
        obligations: What must be done with the merged model.
        reasons: What every rule says, worst first.
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
    def accepted(self) -> tuple[str, ...]:
        """Every acceptance on which the verdict rests."""
        return tuple(sorted({word for reason in self.reasons for word in reason.accepted}))


def combine_licenses(
    parents: Sequence[License | LicensedParent],
    use: Use,
    table: LicenseTable,
    accepted: Mapping[str, str] = MappingProxyType({}),
) -> Combination:
    """Judge a merge of `parents` for `use`.

    Args:
        parents: Everything whose weights go in, adapters and base included; the licences of their ancestors bind too.
            A bare licence stands for a parent named like it.
        use: The intended use.
        table: The known licences.
        accepted: `who: why` by licence identifier or model name (`LicenseSettings.accepted`).

    Raises:
        ValueError: There are no parents.
    """
    if not parents:
        raise ValueError("a merge has at least one parent")
    case = Case.of(parents, use, table)
    reasons = {_settled(rule, finding, accepted) for rule in RULES for finding in rule.judge(case)}
    status = worst_status(reason.status for reason in reasons)
    result = None if status == "blocked" else resulting_license(case)
    if result is not None:
        reasons.add(Reason(rule="R7: licence of the merge", status="allowed", sentence=result.sentence))
    order: tuple[LicenseStatus, ...] = ("blocked", "review", "allowed")
    return Combination(
        status=status,
        license=result.license if result else None,
        license_name=result.license_name if result else None,
        licenses=result.licenses if result else (),
        card=result.card if result else {},
        obligations=obligations(case),
        reasons=tuple(sorted(reasons, key=lambda reason: (order.index(reason.status), reason.rule, reason.sentence))),
    )


def _settled(rule: LicenseRule, finding: LicenseFinding, accepted: Mapping[str, str]) -> Reason:
    """The finding as a reason. A review is settled when each of its subjects is accepted; a block never is."""
    keys = [_acceptance(subject, accepted) for subject in finding.about] if finding.status == "review" else []
    settled = tuple(sorted({f"{key}: {accepted[key]}" for key in keys if key is not None}))
    if not keys or None in keys:
        settled = ()
    status: LicenseStatus = "allowed" if settled else finding.status
    return Reason(
        rule=f"{rule.id}: {rule.subject}",
        status=status,
        sentence=finding.sentence,
        remedy=_remedy(rule, finding) if status != "allowed" else "",
        about=finding.about,
        accepted=settled,
    )


def _acceptance(subject: Subject, accepted: Mapping[str, str]) -> str | None:
    return next((key for key in (subject.license, subject.model) if key is not None and key in accepted), None)


def _remedy(rule: LicenseRule, finding: LicenseFinding) -> str:
    if finding.status != "review":
        return rule.remedy
    keys = sorted({subject.license or subject.model for subject in finding.about})
    return f"{rule.remedy}; to accept: {listed(f'{key!r}' for key in keys)} under `accepted`, each with 'who: why'"
