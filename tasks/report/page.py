"""Render the report page from ``template.html`` with Jinja2, which escapes all external text.

Other pages share its environment and its style: see ``page_template`` and ``page_style``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.report import explanation_text, heat_map, plots, wording
from mergegate.tasks.report.content import ReportContent, ReportedModel
from mergegate.tasks.report.table import TaskRow, compares_per_byte, costs, evaluated_models, task_rows

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

_HERE = Path(__file__).parent
_MAX_UNGROUPED = 10  # largest number of tasks that are drawn without groups


@dataclass(frozen=True)
class Bar:
    """Score of one model, in points."""

    model: str
    points: float
    text: str
    is_merge: bool


@dataclass(frozen=True)
class Bars:
    """Bars of one task, or the mean bars of a group together with its tasks."""

    name: str
    bars: tuple[Bar, ...]
    tasks: tuple[Bars, ...] = ()


def render(content: ReportContent) -> str:
    """Return ``report.html`` as text, without scripts or external resources. Equal content gives equal text."""
    from markupsafe import Markup

    verdict, scoring, windows = content.verdict, content.scoring, content.windows
    models, rows = evaluated_models(content), task_rows(content)
    scored_how = read_how = ""
    if scoring:
        examples = "the tasks' own" if scoring.num_fewshot is None else str(scoring.num_fewshot)
        sample = f"a fixed sample of documents, {scoring.first_look} a task at first"
        parts = [
            f"lm-eval, {scoring.backend} backend",
            sample if scoring.first_look is not None else "all documents",
            f"{examples} few-shot examples",
            "chat template" if scoring.chat_template else "no chat template",
            f"dtype {scoring.dtype}",
            f"batches of {scoring.batch_size}",
            *([f"at most {scoring.max_length} tokens"] if scoring.max_length else []),
        ]
        scored_how = "; ".join([", ".join(parts), *(f"{task} with {setup}" for task, setup in content.asked.items())])
    # Each guarded task with the digest of its data and the datasets behind it, at their known commits:
    # ``gsm8k 3f2a… (openai/gsm8k at 9c1d…)``. Empty if no data was inspected.
    data_digests = {}
    for guard in verdict.guards:
        if guard.data is not None:
            sources = {f"{source.path} at {source.revision[:12]}" for source in guard.data.sources if source.revision}
            behind = f" ({', '.join(sorted(sources))})" if sources else ""
            data_digests[guard.task] = f"{guard.task} {guard.data.digest[:12]}{behind}"
    if windows:
        read_how = f"windows of {windows.max_length} tokens, dtype {windows.dtype}, batches of {windows.batch_size}"
    return page_template("template.html").render(
        content=content,
        verdict=verdict,
        wording=wording,
        size=format_bytes,
        costs=costs(content),
        sentence=wording.sentence(content),
        style=page_style(),
        # Matplotlib draws these plots and escapes the names in them.
        guards_plot=[Markup(plot) for plot in plots.guards_plot(content)],
        drift_plot=[Markup(plot) for plot in plots.drift_plot(content)],
        perplexity_plot=[Markup(plot) for plot in plots.perplexity_plot(content)],
        judge_plot=[Markup(plot) for plot in plots.judge_plot(content)],
        interference_plot=[Markup(plot) for plot in heat_map.interference_plot(content)],
        explaining=explanation_text,
        heat_map_caption=heat_map.heat_map_caption,
        models=models,
        rows=rows,
        marked_answers=marked_answers,
        bars=score_bars(rows, models),
        per_byte=compares_per_byte(content.models, verdict.drift),
        measured=[model for model in content.models if model.likelihoods is not None],
        scored_how=scored_how,
        asked="; ".join(data_digests.values()),
        read_how=read_how,
    )


def score_bars(rows: Sequence[TaskRow], models: Sequence[ReportedModel]) -> tuple[Bars, ...]:
    """Return the bars above the table: one set for each task whose scores are in [0, 1].

    If there are many tasks, they are grouped by the first part of their names, and each group shows its mean.
    """

    def bar(model: ReportedModel, points: float) -> Bar:
        return Bar(model.name, points, wording.number(points, 1), model.role == "merge")

    single: dict[str, Bars] = {}
    for row in rows:
        other_metrics = any(other_row.task == row.task and other_row.metric != row.metric for other_row in rows)
        name = row.label if other_metrics else row.task
        scored = zip(models, row.cells, strict=True)
        if task_bars := tuple(bar(model, 100 * cell.share) for model, cell in scored if cell.share is not None):
            single.setdefault(name, Bars(name, task_bars))
    if len(single) <= _MAX_UNGROUPED:
        return tuple(single.values())
    groups: dict[str, list[Bars]] = {}
    for name, bars in single.items():
        groups.setdefault(name.partition("_")[0], []).append(bars)
    result = []
    for name, members in groups.items():
        means = []
        for model in models:
            points = [item.points for task in members for item in task.bars if item.model == model.name]
            if len(points) == len(members):  # a mean over fewer tasks would not be comparable
                means.append(bar(model, sum(points) / len(points)))
        group = Bars(f"{name}: mean of {len(members)} tasks", tuple(means), tuple(members))
        result.append(members[0] if len(members) == 1 else group)
    return tuple(result)


def marked_answers(reference: str, merge: str) -> tuple[Markup, Markup]:
    """Return both answers, escaped, with ``<mark>`` around the differences.

    Differences are marked by word, or by character if each answer is a single word.
    """
    from markupsafe import Markup, escape

    left, right = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (reference, merge))
    if len(left) <= 1 and len(right) <= 1:
        left, right = list(reference), list(merge)
    marked = [Markup(), Markup()]
    for kind, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for side, text in enumerate(("".join(left[a:b]), "".join(right[c:d]))):
            if text:
                marked[side] += escape(text) if kind == "equal" else Markup("<mark>") + escape(text) + Markup("</mark>")
    return marked[0], marked[1]


@cache
def page_template(file: str) -> Template:
    """Return the Jinja2 template at ``file``, relative to this module. A missing variable is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def breakable(text: str, every: int = 20) -> Markup:
        """Allow line breaks in narrow columns, after punctuation and after ``every`` characters."""
        return Markup("<wbr>").join(re.findall(rf"[^_/,:@-]{{1,{every}}}[_/,:@-]*|[_/,:@-]+", text))

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "breakable": breakable,
        # Replace the hyphen of negative numbers with the minus sign that the page uses elsewhere.
        "minus_signs": lambda text: re.sub(r"(?<![\w-])-(?=[.\d])", wording.MINUS, text),
    }
    return environment.get_template(file)


def page_style(*files: str) -> Markup:
    """Return the shared style sheet, followed by ``files``, which are relative to this module."""
    from markupsafe import Markup

    return Markup("\n".join((_HERE / name).read_text(encoding="utf-8") for name in ("style.css", *files)))
