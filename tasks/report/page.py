"""The page: content into ``template.html`` by Jinja2. Everything that comes from outside is escaped there."""

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
    """``report.html`` as text: one page without scripts or anything to load. Equal content gives equal text."""
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
        # Drawn by matplotlib, which escapes the names in them.
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
        scored_how=_scored_how(content.scoring, content.asked) if content.scoring else "",
        asked=wording.what_was_asked(verdict),
        read_how=_read_how(content.windows) if content.windows else "",
    )


@cache
def _template() -> Template:
    return page_environment(HERE).get_template("template.html")


def page_environment(folder: Path) -> Environment:
    """How templates of this package are read, beside what all pages share (``head.html``): all that comes from outside
    is escaped, what is missing is an error."""
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
    """A sentence from elsewhere, its negative numbers as all others of the page."""
    return re.sub(r"(?<![\w-])-(?=[.\d])", wording.MINUS, text)


def _breakable(text: str, every: int = 20) -> Markup:
    """``text``, escaped, with places where a narrow column may break it: after punctuation and ``every`` characters."""
    from markupsafe import Markup

    pieces = re.findall(rf"[^_/,:@-]{{1,{every}}}[_/,:@-]*|[_/,:@-]+", text)
    return Markup("<wbr>").join(pieces)


def _scored_how(scoring: Scoring, asked: Mapping[str, str]) -> str:
    few = (
        "the tasks' own few-shot examples"
        if scoring.num_fewshot is None
        else f"{scoring.num_fewshot} few-shot examples"
    )
    few_at_first = f"a fixed sample of documents, {scoring.first_look} a task at first"
    which = few_at_first if scoring.first_look is not None else "all documents"
    parts = [
        f"lm-eval, {scoring.backend} backend",
        which,
        few,
        "chat template" if scoring.chat_template else "no chat template",
        f"dtype {scoring.dtype}",
        f"batches of {scoring.batch_size}",
        *([f"at most {scoring.max_length} tokens"] if scoring.max_length else []),
    ]
    return "; ".join([", ".join(parts), *(f"{task} with {how}" for task, how in asked.items())])


def _read_how(windows: WindowSettings) -> str:
    return f"windows of {windows.max_length} tokens, dtype {windows.dtype}, batches of {windows.batch_size}"
