"""Build the tables of scores, serving costs and quantized variants, for the page, the terminal and Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.quality.evaluation import TaskScore
from mergegate.tasks.quality.gate import DriftVerdict, GuardVerdict
from mergegate.tasks.quality.perplexity import Likelihoods
from mergegate.tasks.quality.serve import ServingCost
from mergegate.tasks.quality.variants import ConversionCheck, VariantVerdict
from mergegate.tasks.release.report import wording
from mergegate.tasks.release.report.content import ReportContent, ReportedModel

DECISION_COLUMNS = ("reference", "drop", "max_drop", "margin", "verdict")
VARIANT_COLUMNS = ("variant", "runtime", "size", "largest drop", "perplexity", "verdict")
_RUNTIMES = {"llama_cpp": "llama.cpp", "hf": "transformers", "vllm": "vLLM"}
_COST_COLUMNS: tuple[tuple[str, Callable[[ServingCost], str]], ...] = (
    ("Ready after", lambda measured: measured.ready),
    ("First token", lambda measured: measured.first_token),
    ("Tokens/s", lambda measured: measured.throughput.removesuffix(" tokens/s")),
    ("Memory", lambda measured: measured.memory),
    ("GPU memory", lambda measured: measured.gpu_memory),
)
_MERGE = object()  # a key that differs from every model name


@dataclass(frozen=True)
class Cell:
    """Score of one model on one task, as displayed. The texts are empty if nothing was measured."""

    text: str = ""  # '71.4', in points for scores in [0, 1]
    stderr: str = ""  # '1.2', in the same unit
    best: bool = False  # whether it is the best score of the parents
    share: float | None = None  # the score itself if it is in [0, 1]


@dataclass(frozen=True)
class TaskRow:
    """A task under one metric: a cell per evaluated model, and the guard on it, if any."""

    task: str
    metric: str
    documents: int
    higher_is_better: bool
    cells: tuple[Cell, ...]
    guard: GuardVerdict | None
    in_points: bool = True  # whether scores are shown in points

    @property
    def label(self) -> str:
        """Name of the row if the task has several metrics."""
        return f"{self.task} {self.metric}"


@dataclass(frozen=True)
class Row:
    """A row in the final table, with one text per column. The outcome determines its color."""

    cells: tuple[str, ...]
    outcome: Outcome | None = None
    reference_score: str = ""  # score of the model in the column "reference"


@dataclass(frozen=True)
class ScoreTable:
    """Final table, ready to be drawn. The first column is text. All others are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""


def evaluated_models(content: ReportContent) -> tuple[ReportedModel, ...]:
    """Return the models with scores, in the order of the report and of the columns of ``task_rows``."""
    return tuple(model for model in content.models if model.scores is not None and model.scores.tasks)


def task_rows(content: ReportContent) -> tuple[TaskRow, ...]:
    """Return one row per scored task and metric, in the order of evaluation. Each guard on a task has its own row."""
    models = evaluated_models(content)
    scores: dict[tuple[str, str], dict[str, TaskScore]] = {}
    for model in models:
        for score in model.scores.tasks if model.scores else ():
            scores.setdefault((score.task, score.metric), {})[model.name] = score
    guards: dict[tuple[str, str], list[GuardVerdict]] = {}
    for guard in content.verdict.all_guards:
        guards.setdefault((guard.task, guard.metric), []).append(guard)
    rows = []
    for task, metric in dict.fromkeys((*scores, *guards)):
        by_model = scores.get((task, metric), {})
        higher = all(score.higher_is_better for score in by_model.values())
        # Accuracies are displayed as points. A perplexity or a word count is not scaled.
        in_points = all(wording.is_share(score, content.kind) for score in by_model.values())
        ranked = [by_model[model.name].score for model in models if model.role != "merge" and model.name in by_model]
        best = (max if higher else min)(ranked) if len(ranked) > 1 else None

        guards_or_none: list[GuardVerdict | None] = [*guards.get((task, metric), [])] or [None]
        for row_guard in guards_or_none:
            # A guard whose metric is set per task has scores that are not in the score tables of the models.
            guard_scores: dict[object, float] = {}
            if row_guard and not by_model:
                guard_scores = {row_guard.reference: row_guard.reference_score, _MERGE: row_guard.merge_score}
            cells = []
            for model in models:
                if model_score := by_model.get(model.name):
                    is_best = model.role != "merge" and model_score.score == best
                    value: float | None = model_score.score
                    stderr = _measure(model_score.stderr, in_points)
                else:
                    value = guard_scores.get(_MERGE if model.role == "merge" else model.name)
                    stderr, is_best = "", False
                share = value if value is not None and in_points and 0 <= value <= 1 else None
                cells.append(Cell() if value is None else Cell(_measure(value, in_points), stderr, is_best, share))
            documents = row_guard.n if row_guard else max((score.n for score in by_model.values()), default=0)
            name = wording.metric_name(metric, content.kind)
            rows.append(TaskRow(task, name, documents, higher, tuple(cells), row_guard, in_points))
    return tuple(rows)


def _measure(value: float, in_points: bool) -> str:
    if value != value:  # lm-eval returns NaN if there is no standard error
        return ""
    return wording.number(100 * value, 1) if in_points else wording.number(value, 3)


def final_table(content: ReportContent) -> ScoreTable:
    """Return the table that ends a run: one line per task, one for the mean of all tasks and one for perplexity.

    The columns are the task, one per model, and ``DECISION_COLUMNS``.
    """
    models, rows, verdict = evaluated_models(content), task_rows(content), content.verdict
    shown = models if rows else tuple(model for model in content.models if model.likelihoods is not None)
    no_scores = ("",) * len(shown)
    lines = []
    for row in rows:
        cells = tuple(f"{cell.text} *" if cell.best else cell.text for cell in row.cells)
        label = row.task if sum(other_row.task == row.task for other_row in rows) == 1 else row.label
        if (guard := row.guard) is None:
            lines.append(Row((label, *cells, "", "", "", "", "")))
            continue
        limits = (wording.plain(guard.max_drop), wording.upper_limit(guard))
        lines.append(
            Row(
                (label, *cells, guard.reference, wording.drop(guard), *limits, guard.word),
                guard.outcome,
                _measure(guard.reference_score, row.in_points),
            )
        )
    for left_out in verdict.not_run:
        lines.append(Row((left_out.task, *no_scores, left_out.reference, "", "", "", left_out.word)))
    for suite in verdict.suites:
        reference = suite.reference if len({guard.reference for guard in verdict.guards}) == 1 else ""
        if suite is not verdict.suites[0]:
            reference = suite.reference  # the anchor
        limits = (wording.plain(suite.max_drop), wording.plain(suite.margin))
        cells = (f"mean of {suite.tasks}", *no_scores, reference, wording.drop(suite), *limits, suite.outcome)
        lines.append(Row(cells, suite.outcome))
    tasks = len({guard.task for guard in verdict.guards})
    if not verdict.suites and verdict.overall_drop is not None and tasks > 1:
        change = wording.number(verdict.overall_drop, 1)
        if verdict.overall_low is not None and verdict.overall_high is not None:
            change += f" {wording.interval(verdict.overall_low, verdict.overall_high, 1)}"
        lines.append(Row((f"mean of {tasks}", *no_scores, "", change, "", "", "")))
    if verdict.drift is not None or any(model.likelihoods for model in shown):
        per_byte = compares_per_byte(shown, verdict.drift)
        label = "bits per byte" if per_byte else "perplexity"
        values = tuple(likelihood(model.likelihoods, per_byte) for model in shown)
        if (drift := verdict.drift) is None:
            lines.append(Row((label, *values, "", "", "", "", "")))
        else:
            change = f"{wording.TIMES}{wording.format_ratio(drift)}" if drift.ratio is not None else wording.NOT_FINITE
            limit = f"{wording.TIMES}{wording.plain(drift.max_ratio)}"
            warned = drift.warning and drift.outcome == "pass"
            word = f"pass: warning above {wording.TIMES}{wording.plain(drift.warn_ratio)}" if warned else drift.outcome
            by_name = {model.name: value for model, value in zip(shown, values, strict=True)}
            cells = (label, *values, drift.reference, change, limit, limit, word)
            lines.append(Row(cells, drift.outcome, by_name.get(drift.reference, "")))
            for stratum in drift.strata:
                if stratum.failed:
                    change = f"{wording.TIMES}{wording.stratum_ratio(stratum)}"
                    cells = (f"{label}: {stratum.name}", *no_scores, drift.reference, change, limit, limit, "fail")
                    lines.append(Row(cells, "fail"))
    note = ""
    if any(guard.limit is not None for guard in verdict.guards):
        note = "/task: per-task limit. The mean decides, but one lost task also fails the merge."
    if verdict.advisory:
        note = " ".join(filter(None, (note, "advisory: the verdict is only shown, and does not count.")))
    columns = ("task", *(model.name for model in shown), *DECISION_COLUMNS)
    return ScoreTable(f"{content.name}: {wording.title(verdict).lower()}", columns, tuple(lines), note)


def compares_per_byte(models: tuple[ReportedModel, ...], drift: DriftVerdict | None) -> bool:
    """Return whether likelihoods are compared per byte, because the gate did so or the tokenizers differ."""
    if drift is not None:
        return drift.unit == "byte"
    return len({model.likelihoods.vocabulary for model in models if model.likelihoods}) > 1


def likelihood(measurement: Likelihoods | None, per_byte: bool) -> str:
    """Return a perplexity, or bits per byte, as text. The result is empty if it was not measured."""
    if measurement is None:
        return ""
    return wording.format_magnitude(measurement.bits_per_byte if per_byte else measurement.perplexity)


def as_markdown(content: ReportContent) -> str:
    """Return the verdict, the reasons and the final table as GitHub Markdown, for Prefect artifacts and model cards."""
    table = final_table(content)
    glyph = wording.GLYPHS[content.verdict.outcome]
    lines = [f"## {glyph} {literally(table.title)}", "", literally(wording.sentence(content)), ""]
    if more_reasons := content.verdict.reasons[1:]:
        lines += [*(f"- {literally(reason)}" for reason in more_reasons), ""]
    if table.rows:
        lines += _markdown_table(table.columns, (_marked(row.cells, row.outcome) for row in table.rows), names=1)
        lines += ["", "Scores in points (0 to 100). A positive drop is a loss. \\* marks the best parent."]
        lines += [table.note] if table.note else []
    if rows := variant_rows(content):
        cells = (_marked(row.cells, row.verdict.outcome) for row in rows)
        lines += ["", "### Quantized variants", "", *_markdown_table(VARIANT_COLUMNS, cells, names=2)]
        lines += ["", "Drops are in points, and perplexities are ratios. Both are relative to the merge.", ""]
        lines += [f"- {literally(sentence)}" for sentence in variant_sentences(content)]
    for section in content.sections:
        lines += ["", f"### {literally(section.title)}", "", *(literally(sentence) for sentence in section.sentences)]
        if section.rows:
            lines += ["", *_markdown_table(section.columns, section.rows, names=len(section.columns) - 1)]
    if content.explanation is not None and content.explanation.remedies:
        remedies = content.explanation.remedies
        lines += ["", "What to try:", "", *(f"- {literally(f'{each.text()}: {each.reason}')}" for each in remedies)]
    return "\n".join(lines) + "\n"


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], names: int) -> list[str]:
    """Return a table whose first ``names`` columns and whose last column are text. All others are numbers."""
    alignment = [*[":--"] * names, *["--:"] * (len(columns) - names - 1), ":--"]
    return [
        f"| {' | '.join(row)} |" for row in (map(literally, columns), alignment, *(map(literally, row) for row in rows))
    ]


def _marked(cells: Sequence[str], outcome: Outcome | None) -> tuple[str, ...]:
    return (*cells[:-1], f"{wording.GLYPHS[outcome]} {cells[-1]}" if outcome else cells[-1])


def literally(text: str) -> str:
    """Escape ``text`` so that Markdown displays it literally, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|&~])", r"\\\1", " ".join(text.split()))


@dataclass(frozen=True)
class Cost:
    """Serving cost of one model."""

    name: str
    cells: tuple[str, ...]  # one per column; empty if not measured
    occasion: str  # '2026-11-20, 2 cores'; empty if it equals the merge's
    problem: str
    is_merge: bool


@dataclass(frozen=True)
class CostTable:
    """Table of serving costs, ready to be drawn. It has no rows if nothing was measured."""

    columns: tuple[str, ...]
    rows: tuple[Cost, ...]
    occasion: str  # day and machine of the merge's measurement
    how: str


def costs(content: ReportContent) -> CostTable:
    """Return the serving costs: one row per served model, without columns that are empty for all models.

    The merge is listed below its parents. A row measured on another day or machine than the merge names both.
    """
    served = content.serving
    if not any(model.measured.quantities() for model in served):
        return CostTable((), (), "", "")
    columns = [(name, cell) for name, cell in _COST_COLUMNS if any(cell(model.measured) for model in served)]
    occasion = served[-1].measured.occasion
    rows = tuple(
        Cost(
            name=model.name,
            cells=tuple(cell(model.measured) for _, cell in columns),
            occasion="" if model.measured.occasion == occasion else model.measured.occasion,
            problem=model.problem,
            is_merge=model is served[-1],
        )
        for model in served
    )
    names = tuple(name for name, _ in columns)
    notes = []
    if "Tokens/s" in names:
        notes.append("One request at a time, after warming up; the quickest of three.")
    if "Memory" in names:
        notes.append("Memory is the peak of all processes of the server together, without files that are only mapped.")
    return CostTable(names, rows, occasion, " ".join(notes))


@dataclass(frozen=True)
class VariantRow:
    """One variant as the page, the terminal and Markdown display it. A text is empty if nothing was measured."""

    verdict: VariantVerdict
    runtime: str  # runtime that evaluated the variant: 'llama.cpp'
    size: str  # '145 MB'
    share: str  # size relative to the merge: '54 %'
    drop: str  # '3.8 [1.6, 5.9]': mean drop of a suite, or else the largest drop of all guards
    task: str  # task of this guard; empty for a mean and for a single guard
    perplexity: str  # ratio to the merge: '1.078 [1.065, 1.091]'
    consequence: str  # effect of a verdict that does not allow publication; empty if it does

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of ``VARIANT_COLUMNS``."""
        ratio = f"{wording.TIMES}{self.perplexity}" if self.perplexity else ""
        return (self.verdict.type, self.runtime, self.size, self.drop, ratio, self.verdict.outcome)


def variant_rows(content: ReportContent) -> tuple[VariantRow, ...]:
    """Return one row per variant, in the profile's order."""
    merge_bytes = sum(file.size for file in content.files)
    rows = []
    for variant in content.variants:
        gate, record = variant.gate, variant.record
        drop = task = ""
        if gate is not None and gate.suites:
            drop = wording.drop(gate.suites[0])
        elif gate is not None and gate.guards:
            worst = max(gate.guards, key=lambda guard: guard.drop)
            drop, task = wording.drop(worst), worst.task if len(gate.guards) > 1 else ""
        consequence = "refuses the release" if variant.required else "not published"
        rows.append(
            VariantRow(
                verdict=variant,
                runtime=_RUNTIMES.get(variant.backend, variant.backend),
                size=format_bytes(record.bytes) if record else "",
                share=f"{100 * record.bytes / merge_bytes:.0f} %" if record and merge_bytes else "",
                drop=drop,
                task=task,
                perplexity=wording.format_ratio(gate.drift) if gate and gate.drift else "",
                consequence="" if variant.publishable else consequence,
            )
        )
    return tuple(rows)


def variant_sentences(content: ReportContent) -> tuple[str, ...]:
    """Return a sentence about the variants that passed, followed by :func:`variant_refusals`."""
    passed = [variant.type for variant in content.variants if variant.publishable]
    sentences = []
    if passed:
        effect = "may be published with the merge" if content.verdict.publishable else "would have been published"
        names = " and ".join(filter(None, (", ".join(passed[:-1]), passed[-1])))
        sentences.append(f"{format_count(len(passed), 'quantized variant')} {effect}: {names}.")
    return (*sentences, *variant_refusals(content))


def variant_refusals(content: ReportContent) -> tuple[str, ...]:
    """Return one sentence for each variant that is not published, with its most severe reason."""
    return tuple(
        f"{variant.type} is refused: {variant.reasons[0].removesuffix('.')}."
        for variant in content.variants
        if not variant.publishable
    )


def conversion_sentences(conversion: ConversionCheck) -> tuple[str, ...]:
    """Return sentences about the comparison of the unquantized file with the merge, without its problems."""
    documents = format_count(conversion.documents, "document")
    sentences = [
        f"Without quantization, the log-likelihoods of {documents} differ from those of the merge by "
        f"{conversion.mean_difference:.2g} nats on average and by {conversion.max_difference:.2g} at most (limit of "
        f"the average: {wording.plain(conversion.limit)})."
    ]
    texts = format_count(conversion.texts, "text")
    if conversion.different_texts:
        sentences.append(
            f"Its tokenizer splits {len(conversion.different_texts)} of {texts} differently from that of the merge."
        )
    elif conversion.texts:
        sentences.append(f"Both tokenizers split all {texts} into the same tokens.")
    return tuple(sentences)
