"""Write the evidence section of the model card in Markdown: scores with intervals, verdicts and perplexity."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from mergegate.merge_core.errors import escape_invisible
from mergegate.tasks.evaluation import TaskScore
from mergegate.tasks.gate import GateVerdict, normal_quantile
from mergegate.tasks.report import (
    ReportContent,
    ReportedModel,
    compares_per_byte,
    evaluated_models,
    likelihood,
    wording,
)

_CONFIDENCE = 0.95  # two-sided confidence level for intervals of single scores


def quality_section(content: ReportContent) -> str:
    """Return the text under 'Evaluation': the verdict, its reasons, and the tables that are not empty."""
    verdict = content.verdict
    parts = [f"**{wording.title(verdict)}.** {escape(wording.sentence(content))}"]
    if reasons := verdict.reasons[1:]:
        parts.append("\n".join(f"* {escape(reason)}" for reason in reasons))
    if verdict.untested_note:
        parts.append(f"**Not tested.** {untested_sentence(content)}")
    parts += [part for part in (_scores(content), wording.selection_note(content), _guards(content)) if part]
    drift = verdict.drift
    if models := tuple(model for model in content.models if model.likelihoods is not None):
        per_byte = compares_per_byte(models, drift)
        unit = "bits per byte" if per_byte else "perplexity"
        rows = [
            (_model_label(model), f"{model.likelihoods.documents:,}", likelihood(model.likelihoods, per_byte))
            for model in models
            if model.likelihoods
        ]
        parts.append(f"### Perplexity\n\n{markdown_table(('model', 'documents', unit), rows, 2)}")
        if drift is not None:
            parts.append(
                f"The perplexity of this merge is {escape(wording.format_ratio(drift))} times that of "
                f"{escape(drift.reference)}, the better parent. The limit is {wording.plain(drift.max_ratio)}. "
                f"Verdict: {drift.outcome}."
            )
            parts += ["\n".join(f"* {escape(note)}" for note in notes)] if (notes := wording.drift_notes(drift)) else []
    lines = []
    if content.judge is not None:
        lines.append(f"* Judge {escape(content.judge.model)}: {escape(content.judge.reason)}")
    if content.served:
        passed = sum(check.outcome == "pass" for check in content.served)
        server = f" with {escape(content.server)}" if content.server else ""
        mode = f" The model was {escape(content.served_as)}." if content.served_as else ""
        lines.append(f"* Serving test{server}: {passed} of {len(content.served)} checks passed.{mode}")
    parts += ["\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def untested_sentence(content: ReportContent) -> str:
    """Return the sentence about what no task tests, such as how the merge reads pictures. Empty if there is nothing."""
    note = content.verdict.untested_note
    return f"{escape(note[0].upper() + note[1:])}." if note else ""


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


def escape(text: str) -> str:
    """Return ``text`` as one line of Markdown that displays it literally, with unprintable characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|&~])", r"\\\1", " ".join(escape_invisible(text).split()))


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]], numbers: int) -> str:
    """Return a Markdown table that displays its cells literally. The last ``numbers`` columns are right-aligned."""
    head = tuple(columns)
    rule = [":--"] * (len(head) - numbers) + ["--:"] * numbers
    lines = [tuple(map(escape, head)), tuple(rule), *(tuple(map(escape, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _scores(content: ReportContent) -> str:
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
    what = "Shares of correct answers" if content.kind.reads_text else "Scores and error rates"
    note = f"The brackets contain 95 % intervals. {what} are in points (0 to 100)."
    if not content.kind.reads_text:
        note += " Each is the mean over the documents."
    return f"### Scores\n\n{markdown_table(columns, rows, len(models) + 1)}\n\n{note}"


def _model_label(model: ReportedModel) -> str:
    return "this merge" if model.role == "merge" else model.name


def _guards(content: ReportContent) -> str:
    guards = content.verdict.all_guards
    if not guards:
        return ""
    columns = ("task", "reference", "documents", "drop", "max_drop", "margin", "verdict")
    table = markdown_table(columns, guard_rows(content.verdict), 5)
    notes = (
        guard_note(guards[0].confidence, "the reference", "this merge"),
        wording.error_rate_note(content.verdict, content.kind),
    )
    return f"### Verdicts\n\n{table}\n\n{' '.join(filter(None, notes))}"


def guard_rows(verdict: GateVerdict) -> list[tuple[str, ...]]:
    """Return the rows of a table of guards: task, reference, documents, drop, max_drop, margin and verdict."""
    rows: list[tuple[str, ...]] = []
    for suite in verdict.suites:
        limits = (wording.plain(suite.max_drop), wording.plain(suite.margin))
        start = (f"mean of {suite.tasks} tasks", suite.reference, f"{suite.documents:,}", wording.suite_change(suite))
        rows.append((*start, *limits, suite.outcome))
    for guard in verdict.all_guards:
        upper = wording.plain(guard.margin) if guard.limit is None else f"{wording.plain(guard.limit)} per task"
        limits = (wording.plain(guard.max_drop), upper)
        rows.append((guard.task, guard.reference, f"{guard.n:,}", wording.drop(guard), *limits, guard.word))
    return rows


def guard_note(confidence: float, reference: str, subject: str) -> str:
    """Return the text below a table of guards."""
    return (
        f"The drop is the score of {reference} minus the score of {subject}, in points, on the same documents. A "
        f"positive drop is a loss. The brackets contain an interval ({100 * confidence:g} % on each side). "
        "A guard passes if the upper bound is below the margin. It fails if the drop is shown to be larger than "
        "max_drop. Otherwise it is inconclusive."
    )
