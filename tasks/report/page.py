"""Render the report page from ``template.html`` with Jinja2, which escapes all external text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.evaluation import Scoring
from mergegate.tasks.perplexity import WindowSettings
from mergegate.tasks.report import answers, bars, explanation_text, heat_map, plots, serving_costs, table, wording
from mergegate.tasks.report.content import ReportContent

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup

HERE = Path(__file__).parent


def render(content: ReportContent) -> str:
    """Return ``report.html`` as text: one page without scripts or external resources.

    Equal content gives equal text.
    """
    from markupsafe import Markup

    verdict = content.verdict
    models, rows = table.evaluated_models(content), table.task_rows(content)
    return _template().render(
        content=content,
        verdict=verdict,
        wording=wording,
        size=format_bytes,
        costs=serving_costs.costs(content),
        sentence=wording.sentence(content),
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        # Matplotlib draws these plots and escapes the names in them.
        guards_plot=[Markup(plot) for plot in plots.guards_plot(content)],
        drift_plot=[Markup(plot) for plot in plots.drift_plot(content)],
        perplexity_plot=[Markup(plot) for plot in plots.perplexity_plot(content)],
        judge_plot=[Markup(plot) for plot in plots.judge_plot(content)],
        interference_plot=[Markup(plot) for plot in heat_map.interference_plot(content)],
        explaining=explanation_text,
        what_is_shown=heat_map.what_is_shown,
        models=models,
        rows=rows,
        marked_answers=answers.marked_answers,
        bars=bars.score_bars(rows, models),
        per_byte=table.compares_per_byte(content.models, verdict.drift),
        measured=[model for model in content.models if model.likelihoods is not None],
        scored_how=_scoring_text(content.scoring, content.asked) if content.scoring else "",
        asked=wording.what_was_asked(verdict),
        read_how=_windows_text(content.windows) if content.windows else "",
    )


@cache
def _template() -> Template:
    return page_environment(HERE).get_template("template.html")


def page_environment(folder: Path) -> Environment:
    """Return a Jinja2 environment for the templates in ``folder`` and the shared ``head.html``.

    All external text is escaped, and a missing variable is an error.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.filters["minus_signs"] = _minus_signs
    return environment


def _minus_signs(text: str) -> str:
    """Replace the hyphen of negative numbers in ``text`` with the minus sign that the page uses elsewhere."""
    return re.sub(r"(?<![\w-])-(?=[.\d])", wording.MINUS, text)


def _breakable(text: str, every: int = 20) -> Markup:
    """Return ``text``, escaped, with break opportunities for narrow columns.

    A line may break after punctuation and after ``every`` characters.
    """
    from markupsafe import Markup

    pieces = re.findall(rf"[^_/,:@-]{{1,{every}}}[_/,:@-]*|[_/,:@-]+", text)
    return Markup("<wbr>").join(pieces)


def _scoring_text(scoring: Scoring, prompts: Mapping[str, str]) -> str:
    examples = (
        "the tasks' own few-shot examples"
        if scoring.num_fewshot is None
        else f"{scoring.num_fewshot} few-shot examples"
    )
    sample = f"a fixed sample of documents, {scoring.first_look} a task at first"
    documents = sample if scoring.first_look is not None else "all documents"
    parts = [
        f"lm-eval, {scoring.backend} backend",
        documents,
        examples,
        "chat template" if scoring.chat_template else "no chat template",
        f"dtype {scoring.dtype}",
        f"batches of {scoring.batch_size}",
        *([f"at most {scoring.max_length} tokens"] if scoring.max_length else []),
    ]
    return "; ".join([", ".join(parts), *(f"{task} with {setup}" for task, setup in prompts.items())])


def _windows_text(windows: WindowSettings) -> str:
    return f"windows of {windows.max_length} tokens, dtype {windows.dtype}, batches of {windows.batch_size}"
