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
from mergegate.tasks.publish.card import license_section
from mergegate.tasks.publish.card_scores import escape, untested_sentence
from mergegate.tasks.publish.content import COMPLIANCE, RECIPE
from mergegate.tasks.publish.facts import ReleaseFacts
from mergegate.tasks.publish.parent_facts import DocumentLink, ParentFacts
from mergegate.tasks.report import ReportContent

_GENERAL_PURPOSE = 1e23  # indicative criterion of the guidelines for a general-purpose model
_ACT = "https://eur-lex.europa.eu/eli/reg/2024/1689/oj"
_GUIDELINES = "https://digital-strategy.ec.europa.eu/en/policies/guidelines-gpai-providers"
_USES = {"Intended use": "intended_use", "Out of scope": "out_of_scope", "Known limits": "limits"}
_NOT_STATED = "not stated by the publisher"
_DISCLAIMER = (
    "**This sheet is not legal advice.** mergegate computed each fact, or copied it from the source that is named next "
    "to it. mergegate did not check the statements of the publisher and of the providers of the parents, and did not "
    "open any link."
)
_LAW = f"""mergegate does not decide whether these requirements apply to this release or to its publisher.

* [Regulation (EU) 2024/1689]({_ACT}) (AI Act), as amended. Article 53 requires from providers of general-purpose \
models technical documentation, information for providers who integrate the model, a policy on copyright, and a public \
summary of the training content. Models under a free and open-source license are exempt from the first two under the \
conditions of Article 53(2), but not from the last two. Article 55 has further requirements for models with systemic \
risk.
* [Guidelines of the Commission on general-purpose models]({_GUIDELINES}), C(2025) 5045 of 18 July 2025, adopted as \
C(2025) 7719 of 19 November 2025, on downstream modifiers. They are not binding. What counts is whether the \
modification changes the generality, the capabilities or the systemic risk of the model significantly. The indicative \
criterion is that the training compute of the modification is greater than a third of that of the original model. This \
sheet counts all operations of the modification, whether they train or not."""


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
    sections = [
        f"# Compliance sheet of {escape(facts.name)}",
        _DISCLAIMER,
        f"## Publisher\n\n{_table(('fact', 'value', 'source'), _publisher(facts))}",
        f"## Modification\n\n{_modification(facts, content)}",
        f"## Parents\n\n{_parents(facts)}",
        f"## License\n\n{license_section(license, missing, files, page='[README.md](README.md)')}\n\nSource: license "
        "check, `mergegate_licence` in [provenance.json](provenance.json).",
        f"## Use and limits\n\n{_uses(facts)}",
        f"## Evaluation\n\n{_evaluation(facts, content)}",
        f"## Missing facts\n\n{_bullets(_missing(facts), 'No fact is missing.')}",
        f"## Requirements\n\n{_LAW}",
    ]
    return "\n\n".join(sections) + "\n"


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
            f"* {title}: {' '.join(map(escape, getattr(facts.about, field))) or f'{_NOT_STATED}.'}"
            for title, field in _USES.items()
        ),
    ]
    return (
        f"[{COMPLIANCE}]({COMPLIANCE}) has these facts with their sources, and lists what is missing. It is not legal "
        "advice.\n\n" + "\n".join(lines)
    )


def _publisher(facts: ReleaseFacts) -> Iterator[tuple[str, ...]]:
    supplier, source = facts.about.supplier, f"`{facts.supplier_source or 'publish.about'}`"
    yield "name", escape(supplier.name) if supplier else _NOT_STATED, source
    if supplier and supplier.url:
        yield "web page", escape(supplier.url), source
    if supplier and supplier.contact:
        yield "contact", escape(supplier.contact), source
    yield "release", escape(facts.name), "name in the profile"
    if facts.hub_id:
        yield "repository", f"[{escape(facts.hub_id)}](https://huggingface.co/{facts.hub_id})", "target in the profile"


def _modification(facts: ReleaseFacts, content: ReportContent) -> str:
    modification, is_variant = facts.modification, bool(facts.ancestors)
    threshold = ModificationThreshold.from_parents(facts.ancestors or facts.parents)
    weights = "headers of the weights"
    what = "Weights of the merge, rounded to fewer bits." if is_variant else "Weights of the parents, merged."
    how = "[provenance.json](provenance.json)" if is_variant else f"[{RECIPE}]({RECIPE})"
    training = "none" if content.routers is None else "none, except for routers that were fitted on calibration texts"
    calibration = [data.name for data in facts.datasets if data.purpose == "calibration"]
    if modification.prompts:
        calibration.append(f"{modification.prompts} prompts of the recipe for the routers")
    rows = [
        ("what was modified", what, how),
        ("how", escape(facts.method), how),
        ("training", training, how),
        ("texts that models read for it", escape(", ".join(calibration)) or "none", how),
        ("class of the model", escape(facts.architecture or facts.model_type) or "unknown", "`config.json`"),
        ("parameters", f"{facts.parameters:,}" if facts.parameters is not None else "unknown", weights),
        ("number formats", escape(", ".join(facts.dtypes)) or "unknown", weights),
    ]
    side = "below" if modification.flop < threshold.flop else "**above**"
    bound = (
        f"The modification takes at most {modification.formula} = {flop_text(modification.flop)} floating-point "
        f"operations, which is {side} the indicative threshold of {flop_text(threshold.flop)} ({threshold.reason})."
    )
    if is_variant:
        bound += " The sheet of the merge, which these variants were computed from, has the bound of the merge."
    return f"{_table(('fact', 'value', 'source'), rows)}\n\n{bound}"


def _parents(facts: ReleaseFacts) -> str:
    columns = ("model", "role", "license", "training compute", "summary of the training content", "copyright policy")
    groups: dict[object, list[ParentFacts]] = {}
    originals = sorted(facts.ancestors or facts.parents, key=lambda parent: parent.role != "base")  # as in the card
    for parent in (*(facts.parents if facts.ancestors else ()), *originals):
        # Checkpoints of a training run share one card.
        key = replace(parent, name="", identity="", cards=tuple(replace(card, model="") for card in parent.cards))
        groups.setdefault(key if parent.cards and not parent.url else parent, []).append(parent)
    rows, details = list[tuple[str, ...]](), list[str]()
    for group in groups.values():
        first = group[0]
        name = f"[{escape(first.name)}]({first.url})" if first.url else escape(first.name)
        if len(group) > 1:
            name += f" to {escape(group[-1].name)} ({len(group)} checkpoints)"
        compute = "unknown"
        if first.training_compute is not None:
            compute = f"{flop_text(first.training_compute)} ({escape(first.training_compute_source)})"
        if first.role == "merge":
            rows.append((name, first.role, escape(first.license), "", "in its sheet", "in its sheet"))
            details.append(f"{name}: release with the SHA256SUMS `{first.identity}`.")
            continue
        found = [_links(links) for links in (first.training_summaries, first.copyright_policies)]
        rows.append((name, first.role, escape(first.license) or "not checked", compute, *found))
        cards = ", ".join(
            f"README.md{f' of {escape(card.model)}' if len(first.cards) > 1 else ''}, sha256 `{card.sha256}`"
            for card in first.cards
        )
        data = ", ".join(map(escape, first.datasets)) or "not named in its card"
        lines = [f"card: {cards or 'none'}", f"training data: {data}"]
        if len(group) == 1:
            lines.insert(0, f"{'commit' if first.url else 'sha256 of its files'} `{first.identity}`")
        if first.energy is not None:
            lines.append(f"energy of its training: {first.energy:g} kWh (`co2_eq_emissions` in its card)")
        if first.emissions is not None:
            source = f", source: {escape(first.emissions_source)}" if first.emissions_source else ""
            lines.append(
                f"emissions of its training: {first.emissions:g} g CO2 equivalent (`co2_eq_emissions` in its card"
                f"{source})"
            )
        details.append(f"{name}: " + "; ".join(lines) + ".")
    text = (
        "The links are those in the cards of the models. mergegate found them by their words, so a document with "
        "another name is missing here. The training data is the field `datasets` of each card."
    )
    return "\n\n".join([_table(columns, rows), text, _bullets(details, "")])


def _links(links: Sequence[DocumentLink]) -> str:
    return ", ".join(f"[{escape(link.text)}]({link.url})" for link in links) or "not found in its card"


def _uses(facts: ReleaseFacts) -> str:
    return "\n\n".join(
        f"**{title}** (`publish.about.{field}`)\n\n"
        + _bullets(map(escape, getattr(facts.about, field)), f"{_NOT_STATED[0].upper()}{_NOT_STATED[1:]}.")
        for title, field in _USES.items()
    )


def _evaluation(facts: ReleaseFacts, content: ReportContent) -> str:
    rows = [
        (
            escape(data.name),
            data.purpose,
            f"{data.documents:,}" if data.documents is not None else "unknown",
            escape(", ".join(data.sources)) or "local data",
            f"`{data.digest[:16]}`" if data.digest else "unknown",
        )
        for data in facts.datasets
    ]
    columns = ("data", "purpose", "documents", "source", "digest")
    parts = [_table(columns, rows) if rows else "Nothing was evaluated."]
    if rows:
        parts.append(
            "Source: [evidence](evidence/) and [report.html](report.html), which have the results. A digest is the "
            "start of a sha256."
        )
    untested = untested_sentence(content)
    parts.append(
        "Not evaluated: everything else, such as safety, bias and privacy, unless a task above tests it."
        + (f" {untested}" if untested else "")
    )
    return "\n\n".join(parts)


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


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]] | Iterator[Sequence[str]]) -> str:
    """Return a Markdown table of cells that are Markdown already."""
    lines = [columns, [":--"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bullets(lines: Sequence[str] | Iterator[str], default: str) -> str:
    return "\n".join(f"* {line}" for line in lines) or default
