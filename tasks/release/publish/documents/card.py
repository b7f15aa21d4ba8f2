"""Write the pages in Markdown from templates: the model card of a merge or of variants, and the compliance sheet.

A card has metadata for the Hub, and a page that helps readers decide about the model.

The compliance sheet collects facts that a modifier of a general-purpose model may need under the AI Act (Regulation
(EU) 2024/1689). Each fact has a source, and each missing fact is listed. The sheet draws no legal conclusion. The
Commission's guidelines name an indicative criterion: a modifier becomes the provider of a general-purpose model if the
modification takes more than a third of the training compute of the original model. If that number cannot be known or
estimated, a third of 10^23 operations is the threshold, and a third of 10^25 for models with systemic risk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import yaml

from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind
from mergegate.merge_core.checkpoint import MODULES_FILE, companion_kind
from mergegate.merge_core.errors import escape_invisible
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.merge import describe_changes
from mergegate.tasks.preflight.licenses import LicenseVerdict, Obligation
from mergegate.tasks.quality.evaluation import TaskScore
from mergegate.tasks.quality.gate import GateVerdict, normal_quantile
from mergegate.tasks.quality.serve import SERVED_AS_LORA
from mergegate.tasks.release.publish.content import STATEMENT_OF_CHANGES, variant_evidence
from mergegate.tasks.release.publish.documents.facts import (
    DocumentFacts,
    MergeOrigin,
    ParentFacts,
    ReleaseFacts,
    VariantOrigin,
)
from mergegate.tasks.release.report import (
    ReportContent,
    ReportedModel,
    compares_per_byte,
    conversion_sentences,
    evaluated_models,
    likelihood,
    variant_rows,
    wording,
)

if TYPE_CHECKING:
    from jinja2 import Environment

_GENERAL_PURPOSE = 1e23  # indicative criterion of the guidelines for a general-purpose model
_USES = {"Intended use": "intended_use", "Out of scope": "out_of_scope", "Known limits": "limits"}
_CONFIDENCE = 0.95  # two-sided confidence level for intervals of single scores


def model_card(document: DocumentFacts, files: Sequence[str]) -> str:
    """Return the content of README.md, which contains no dates and no local paths.

    ``files`` names the files of the release that exist before the card is written.
    """
    content, origin = document.content, document.origin
    about: dict[str, object] = {
        "metadata": document.metadata,
        "front": yaml.safe_dump(document.metadata, sort_keys=False, allow_unicode=True),
        "threshold": ModificationThreshold.from_parents(document.facts.ancestors or document.facts.parents),
    }
    if not isinstance(origin, MergeOrigin):
        return _variant_card(document, files, origin, about)
    is_adapter = document.metadata.get("library_name") == "peft"
    measured = tuple(model for model in content.models if model.likelihoods is not None)
    per_byte = compares_per_byte(measured, content.verdict.drift)
    likelihoods = [
        (_model_label(model), f"{model.likelihoods.documents:,}", likelihood(model.likelihoods, per_byte))
        for model in measured
        if model.likelihoods
    ]
    unit = "bits per byte" if per_byte else "perplexity"
    kinds = {companion_kind(name) for name in files}
    copied = ["tokenizer"] if "tokenizer" in kinds or content.kind == TEXT_GENERATOR else []
    copied += ["processor"] if "processor" in kinds and content.kind != TEXT_GENERATOR else []
    copied += ["settings of its modules"] if MODULES_FILE in files else []
    return _render(
        "merge_card.md.j2",
        document,
        files,
        **about,
        changes=describe_changes(origin.weights, [escape(parent.ref) for parent in origin.parents]),
        is_adapter=is_adapter,
        copied_files=f"{_listed(['Configuration', *copied])} {'were' if copied else 'was'}",
        code=loading_code(content.kind, document.facts.address, files, is_adapter=is_adapter),
        is_text_generator=content.kind == TEXT_GENERATOR,
        was_served_as_lora=content.served_as.startswith(SERVED_AS_LORA),
        scores=_scores(content),
        likelihoods=literal_table(("model", "documents", unit), likelihoods, 2) if likelihoods else "",
        error_rates=wording.error_rate_note(content.verdict, content.kind),
    )


def _variant_card(
    document: DocumentFacts, files: Sequence[str], origin: VariantOrigin, about: Mapping[str, object]
) -> str:
    content = document.content
    published = [verdict for verdict in content.variants if verdict.type in origin.files]
    gates = [(verdict.type, verdict.gate) for verdict in published if verdict.gate]
    guards = [(name, task, *cells) for name, gate in gates for task, _, *cells in guard_rows(gate)]
    columns = ("variant", "task", "documents", "drop", "max_drop", "margin", "verdict")
    return _render(
        "variant_card.md.j2",
        document,
        files,
        **about,
        origin=origin,
        published=published,
        rows=[row for row in variant_rows(content) if row.verdict.type in origin.files and row.verdict.record],
        guards=literal_table(columns, guards, 5) if guards else "",
        confidence=next((guard.confidence for _, gate in gates for guard in gate.all_guards), 0.0),
    )


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


def compliance_sheet(document: DocumentFacts, files: Sequence[str]) -> str:
    """Return the content of COMPLIANCE.md. ``files`` are those of ``model_card``."""
    facts = document.facts
    calibration = [data.name for data in facts.datasets if data.purpose == "calibration"]
    if facts.modification.prompts:
        calibration.append(f"{facts.modification.prompts} prompts of the recipe for the routers")
    groups: dict[object, list[ParentFacts]] = {}
    originals = sorted(facts.ancestors or facts.parents, key=lambda parent: parent.role != "base")  # as in the card
    for parent in (*(facts.parents if facts.ancestors else ()), *originals):
        # Checkpoints of a training run share one card.
        key = replace(parent, name="", identity="", cards=tuple(replace(card, model="") for card in parent.cards))
        groups.setdefault(key if parent.cards and not parent.url else parent, []).append(parent)
    return _render(
        "compliance.md.j2",
        document,
        files,
        threshold=ModificationThreshold.from_parents(originals),
        calibration=calibration,
        parents=list(groups.values()),
        absent=list(_missing(facts)),
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


def _render(template: str, document: DocumentFacts, files: Sequence[str], **values: object) -> str:
    """Return the document that a template in this directory gives. A missing value is an error."""
    from jinja2 import TemplateError

    about = {name: getattr(document, name) for name in ("content", "facts", "license", "missing")}
    try:
        return _environment().get_template(template).render(document=document, files=files, **about, **values)
    except TemplateError as error:  # the facts of a release that anyone has written are incomplete
        raise ValueError(f"{template}: {error}") from None


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "md": escape,
        "bullets": lambda lines: "\n".join(f"* {escape(line)}" for line in lines),
        "code": lambda text, language: code_block(text.removesuffix("\n"), language) + "\n",
        "command": lambda command, purpose: f"{command:<48} # {purpose}",
        "conversion_text": lambda conversion: " ".join(conversion_sentences(conversion)),
        "distinct": lambda values: list(dict.fromkeys(values)),
        "paragraphs": lambda parts: "\n\n".join(part for part in parts if part),
    }
    environment.globals |= {
        "code_block": code_block,
        "display_lines": display_lines,
        "format_bytes": format_bytes,
        "flop_text": flop_text,
        "guard_rows": guard_rows,
        "license_links": _license_links,
        "listed": _listed,
        "quote": quote,
        "statement_of_changes": STATEMENT_OF_CHANGES,
        "table": literal_table,
        "untested_sentence": untested_sentence,
        "uses": _USES,
        "variant_evidence": variant_evidence,
        "wording": wording,
    }
    return environment


def loading_code(kind: ModelKind, address: str, files: Collection[str], *, is_adapter: bool) -> str:
    """Return the code that loads a release, or an empty string if no library has a class for it.

    ``kind`` is that of the model, or of the base model of an adapter. ``address`` is an id on the Hub, or a path.
    """
    if not kind.loader:
        return ""
    processor = _processor_class(kind, files, is_adapter=is_adapter)
    about = {"kind": kind, "is_adapter": is_adapter, "is_text_generator": kind == TEXT_GENERATOR}
    code = _environment().get_template("loading_code.py.j2").render(address=address, processor=processor, **about)
    return code.removesuffix("\n")


def _processor_class(kind: ModelKind, files: Collection[str], *, is_adapter: bool) -> str:
    """Return the class that prepares the model's inputs. Empty if the release has no files for it."""
    kinds = {companion_kind(name) for name in files}
    if "processor" in kinds or (is_adapter and kind.modalities):
        return "AutoProcessor"
    return "AutoTokenizer" if "tokenizer" in kinds or is_adapter or kind == TEXT_GENERATOR else ""


def score_interval(score: TaskScore) -> tuple[float, float]:
    """Return the 95 % interval of one score, in the score's own unit, or NaN without a standard error.

    For a share of correct answers, this is Wilson's interval (1927, J. Am. Stat. Assoc. 22:209). It stays within [0, 1]
    and has a positive width even if all answers are correct. For graded scores, it is the normal interval.
    """
    quantile, p, n = normal_quantile((1 + _CONFIDENCE) / 2), score.score, score.n
    variance = p * (1 - p)
    is_share = 0 <= p <= 1 and math.isclose(score.stderr**2 * (n - 1), variance, rel_tol=1e-6, abs_tol=1e-12)
    if not is_share:
        return p - quantile * score.stderr, p + quantile * score.stderr
    square = quantile**2
    center = (p + square / (2 * n)) / (1 + square / n)
    half = quantile * math.sqrt(variance / n + square / (4 * n * n)) / (1 + square / n)
    return max(0.0, center - half), min(1.0, center + half)


def _scores(content: ReportContent) -> str:
    """Return the table of all scores with their intervals, or an empty string without scores."""
    models = evaluated_models(content)
    if not models:
        return ""
    by_model = {m.name: {(s.task, s.metric): s for s in (m.scores.tasks if m.scores else ())} for m in models}
    keys = dict.fromkeys(key for scores in by_model.values() for key in scores)
    rows = []
    for task, metric in keys:
        cells = [by_model[model.name].get((task, metric)) for model in models]
        documents = max(cell.n for cell in cells if cell)
        row = [task, wording.metric_name(metric, content.kind, with_direction=True), f"{documents:,}"]
        for cell in cells:
            if cell is None:
                row.append("")
                continue
            low, high = score_interval(cell)
            scale, decimals = (100.0, 1) if wording.is_share(cell, content.kind) else (1.0, 3)
            shown = wording.number(scale * cell.score, decimals)
            interval = "" if math.isnan(low) else f" {wording.interval(scale * low, scale * high, decimals)}"
            row.append(shown + interval)
        rows.append(row)
    columns = ("task", "metric", "documents", *(_model_label(model) for model in models))
    return literal_table(columns, rows, len(models) + 1)


def _model_label(model: ReportedModel) -> str:
    return "this merge" if model.role == "merge" else model.name


def guard_rows(verdict: GateVerdict) -> list[tuple[str, ...]]:
    """Return the rows of a table of guards: task, reference, documents, drop, max_drop, margin and verdict."""
    rows: list[tuple[str, ...]] = []
    for suite in verdict.suites:
        limits = (wording.plain(suite.max_drop), wording.plain(suite.margin))
        start = (f"mean of {suite.tasks} tasks", suite.reference, f"{suite.documents:,}", wording.drop(suite))
        rows.append((*start, *limits, suite.outcome))
    for guard in verdict.all_guards:
        upper = wording.plain(guard.margin) if guard.limit is None else f"{wording.plain(guard.limit)} per task"
        limits = (wording.plain(guard.max_drop), upper)
        rows.append((guard.task, guard.reference, f"{guard.n:,}", wording.drop(guard), *limits, guard.word))
    return rows


def _license_links(item: Obligation, files: Sequence[str]) -> str:
    """Return links to the license texts in the release that an obligation names, or else to all of them."""
    texts = [name for name in files if name == "LICENSE" or name.startswith("licenses/")]
    sources = (*item.because, item.model)
    own = [name for name in texts if name.removeprefix("licenses/").removesuffix(".txt") in sources]
    return ", ".join(f"[{name}]({quote(name)})" for name in own or texts)


def display_lines(license: LicenseVerdict) -> tuple[str, ...]:
    """Return the lines that licenses require to be displayed, such as 'Built with Llama'."""
    lines = dict.fromkeys(item.text for item in license.combination.obligations if item.kind == "display")
    return tuple(f"**{escape(line)}**" for line in lines)


def untested_sentence(content: ReportContent) -> str:
    """Return the sentence about what no task tests, such as how the merge reads pictures. Empty if there is nothing."""
    note = content.verdict.untested_note
    return f"{escape(note[0].upper() + note[1:])}." if note else ""


def _listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence: 'a, b and c'."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def escape(text: str) -> str:
    """Return ``text`` as one line of Markdown that displays it literally, with unprintable characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|&~])", r"\\\1", " ".join(escape_invisible(text).split()))


def literal_table(columns: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 0) -> str:
    """Return a Markdown table that displays its cells literally. The last ``numbers`` columns are right-aligned."""
    head = tuple(map(escape, columns))
    rule = [":--"] * (len(head) - numbers) + ["--:"] * numbers
    lines = [head, rule, *(tuple(map(escape, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code_block(text: str, language: str) -> str:
    """Return ``text`` as a code block of Markdown."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
