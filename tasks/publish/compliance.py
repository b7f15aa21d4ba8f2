"""Write the compliance sheet of a release: its modification, parents, licenses, uses and tests.

The sheet collects facts that a modifier of a general-purpose model may need under the AI Act (Regulation (EU)
2024/1689). Each fact has a source, and each missing fact is listed. The sheet draws no legal conclusion.

The Commission's guidelines name an indicative criterion: a modifier becomes the provider of a general-purpose model if
the modification takes more than a third of the training compute of the original model. If that number cannot be known
or estimated, a third of 10^23 operations is the threshold, and a third of 10^25 for models with systemic risk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mergegate.tasks.preflight.licenses import LicenseVerdict, Obligation
from mergegate.tasks.publish.card import escape, render_markdown
from mergegate.tasks.publish.content import COMPLIANCE
from mergegate.tasks.publish.facts import ParentFacts, ReleaseFacts
from mergegate.tasks.report import ReportContent

_GENERAL_PURPOSE = 1e23  # indicative criterion of the guidelines for a general-purpose model
_USES = {"Intended use": "intended_use", "Out of scope": "out_of_scope", "Known limits": "limits"}


@dataclass(frozen=True)
class ModificationThreshold:
    """A third of the training compute of the original model, to compare the modification with.

    Attributes:
        flop: Threshold in floating-point operations.
        reason: Clause that says which number was used and why.
    """

    flop: float
    reason: str

    @classmethod
    def from_parents(cls, parents: Sequence[ParentFacts]) -> ModificationThreshold:
        """Return the smallest threshold of all parents. For an unknown training compute, a third of 10^23 counts."""
        known = [parent for parent in parents if parent.training_compute is not None]
        smallest = min(known, key=lambda parent: parent.training_compute or 0.0, default=None)
        unknown = len(parents) - len(known)
        if smallest is not None and smallest.training_compute is not None:
            own = smallest.training_compute
            if not unknown or own <= _GENERAL_PURPOSE:
                source = escape(smallest.training_compute_source)
                others = ", the smallest known training compute of a parent" if len(parents) > 1 else ""
                return cls(own / 3, f"a third of {flop_text(own)} for {escape(smallest.name)} ({source}){others}")
        which = "a parent" if len(parents) == 1 or unknown < len(parents) else "the parents"
        return cls(
            _GENERAL_PURPOSE / 3,
            f"a third of 10^23, because the training compute of {which} is unknown; for models with systemic risk, "
            "a third of 10^25 would count",
        )


def flop_text(value: float) -> str:
    """Return a number of operations, rounded to two digits: ``3.3 · 10^22``."""
    if value <= 0:
        return "0"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa} · 10^{int(exponent)}"


def compliance_sheet(
    facts: ReleaseFacts,
    content: ReportContent,
    license: LicenseVerdict,
    missing: Sequence[Obligation],
    files: Sequence[str],
) -> str:
    """Return the content of COMPLIANCE.md. The arguments after ``content`` are those of ``model_card``."""
    calibration = [data.name for data in facts.datasets if data.purpose == "calibration"]
    if facts.modification.prompts:
        calibration.append(f"{facts.modification.prompts} prompts of the recipe for the routers")
    groups: dict[object, list[ParentFacts]] = {}
    originals = sorted(facts.ancestors or facts.parents, key=lambda parent: parent.role != "base")  # as in the card
    for parent in (*(facts.parents if facts.ancestors else ()), *originals):
        # Checkpoints of a training run share one card.
        key = replace(parent, name="", identity="", cards=tuple(replace(card, model="") for card in parent.cards))
        groups.setdefault(key if parent.cards and not parent.url else parent, []).append(parent)
    return render_markdown(
        "compliance.md.j2",
        facts=facts,
        content=content,
        license=license,
        missing=tuple(missing),
        files=files,
        threshold=ModificationThreshold.from_parents(originals),
        calibration=calibration,
        parents=list(groups.values()),
        uses=_USES,
        absent=list(_missing(facts)),
        flop_text=flop_text,
    )


def compliance_section(facts: ReleaseFacts) -> str:
    """Return the summary of the sheet for the card, without its heading."""
    originals, flop = facts.ancestors or facts.parents, facts.modification.flop
    threshold = ModificationThreshold.from_parents(originals)
    summaries = sum(bool(parent.training_summaries) for parent in originals)
    policies = sum(bool(parent.copyright_policies) for parent in originals)
    lines = [
        f"* Modification: at most {flop_text(flop)} floating-point operations, {flop_text(flop / threshold.flop)} of "
        f"the threshold ({threshold.reason}).",
        f"* Parents whose card links to a summary of the training content: {summaries} of {len(originals)}; to a "
        f"copyright policy: {policies} of {len(originals)}.",
        *(
            f"* {title}: {' '.join(map(escape, getattr(facts.about, field))) or 'not stated by the publisher.'}"
            for title, field in _USES.items()
        ),
    ]
    return (
        f"[{COMPLIANCE}]({COMPLIANCE}) has these facts with their sources, and lists what is missing. It is not legal "
        "advice.\n\n" + "\n".join(lines)
    )


def _missing(facts: ReleaseFacts) -> Iterator[str]:
    """Yield one sentence for each fact without a source."""
    about = facts.about
    if about.supplier is None:
        yield "Publisher: set `publish.about.supplier`."
    for title, field in _USES.items():
        if not getattr(about, field):
            yield f"{title}: set `publish.about.{field}`."
    if facts.parameters is None:
        yield "Number of parameters: the stored weights do not show it."
    if all(data.purpose == "calibration" for data in facts.datasets):
        yield "Evaluation: no model was evaluated."
    names_by_absent_facts: dict[str, list[str]] = {}
    for parent in {parent.cards or parent.name: parent for parent in facts.ancestors or facts.parents}.values():
        absent = ", ".join(
            name
            for name, value in (
                ("license", parent.license),
                ("training compute", parent.training_compute),
                ("summary of the training content", parent.training_summaries),
                ("copyright policy", parent.copyright_policies),
                ("training data", parent.datasets),
                ("energy or emissions of the training", parent.energy or parent.emissions),
            )
            if not value
        )
        if absent:
            names_by_absent_facts.setdefault(absent, []).append(escape(parent.name))
    for absent, names in names_by_absent_facts.items():
        yield f"{', '.join(names)}: {absent}."
