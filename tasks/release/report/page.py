"""Render the report page with Jinja2, which escapes all external text, and the page of a run without a verdict.

Other pages share the frame, the environment and the style: see ``render_page``. A run without a verdict was refused by
a check, is invalid, failed, or had no new work. Its page shows why, the remedy and the completed stages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import Finding, escape_invisible
from mergegate.merge_core.wording import format_bytes, format_duration
from mergegate.tasks.base.stage import StageEnd, joint_status
from mergegate.tasks.release.report import explanation_text, plots, table_rows, wording
from mergegate.tasks.release.report.content import ReportContent
from mergegate.tasks.release.report.history import outcome_of_status, status_word

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).parent / "templates"
_CONTENTS = re.compile("<!--contents-->.*?<!--/contents-->", re.DOTALL)
_SECTION = re.compile(r'<section id="([\w-]+)">\s*<h2>(.*?)</h2>', re.DOTALL)
_STAGES = "<!--stages--><!--/stages-->"
_RESUMES = "The results of finished stages are cached, so the next run continues from there."
_CONSEQUENCES = {
    "refused": "This run merged and published nothing.",
    "invalid": "This run merged and published nothing, because its input is invalid.",
    "interrupted": f"A user or the system stopped this run. {_RESUMES}",
    "failed": f"This is an error in mergegate or its environment, not a verdict on the merge. {_RESUMES}",
}


def render_page(template: str, *styles: str, **variables: Any) -> str:
    """Return a page as HTML, with a table of its contents. A missing variable is an error.

    Args:
        template: Name of the Jinja2 template, which extends ``frame.html``.
        styles: Names of the page's style sheets, in addition to the shared one.
        variables: Variables of the template. ``page_outcome`` sets the color of the headline.
    """
    style = style_sheets("style.css", *styles)
    return add_contents(environment().get_template(template).render(style=style, **variables))


def style_sheets(*names: str) -> Markup:
    """Return the text of style sheets, one after the other."""
    from markupsafe import Markup

    return Markup("\n".join((_TEMPLATES / name).read_text(encoding="utf-8") for name in names))


def macros(template: str) -> Any:
    """Return the macros of a template as an object with methods, which return HTML."""
    return environment().get_template(template).module


def add_contents(page: str) -> str:
    """Return a page whose table of contents links to its sections, in place of an earlier one."""
    items = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading in _SECTION.findall(page))
    nav = f'<!--contents--><nav class="contents" aria-label="Contents"><ul>{items}</ul></nav><!--/contents-->'
    return _CONTENTS.sub(lambda _: nav, page, count=1)


@cache
def environment() -> Environment:
    """Return the Jinja2 environment of all pages, which escapes all text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def breakable(text: str, every: int = 20) -> Markup:
        """Allow line breaks in narrow columns, after punctuation and after ``every`` characters."""
        return Markup("<wbr>").join(re.findall(rf"[^_/,:@-]{{1,{every}}}[_/,:@-]*|[_/,:@-]+", text))

    jinja = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: type(value)(escape_invisible(value)) if isinstance(value, str) else value,
    )
    jinja.globals |= {"wording": wording, "size": format_bytes, "duration": format_duration}
    jinja.filters |= {
        "breakable": breakable,
        # Replace the hyphen of negative numbers with the minus sign that the page uses elsewhere.
        "minus_signs": lambda text: re.sub(r"(?<![\w-])-(?=[.\d])", wording.MINUS, text),
        "sentence_case": wording.sentence_case,
        "address": quote,
    }
    return jinja


def render(content: ReportContent) -> str:
    """Return ``report.html`` as text, without scripts or external resources. Equal content gives equal text."""
    per_byte = table_rows.compares_per_byte(content.models, content.verdict.drift)
    likelihoods = [(model.name, model.likelihoods, model.role == "merge") for model in content.models]
    if content.ensemble is not None:
        likelihoods.insert(-1, ("ensemble of the parents", content.ensemble, False))
    return render_page(
        "release.html",
        *("reading.css", *(["variants.css"] if content.variants else [])),
        content=content,
        verdict=content.verdict,
        page_outcome=content.verdict.outcome,
        plots=plots,
        table_rows=table_rows,
        explaining=explanation_text,
        models=table_rows.evaluated_models(content),
        rows=table_rows.task_rows(content),
        marked_answers=marked_answers,
        per_byte=per_byte,
        measured=[
            (name, table_rows.likelihood(value, per_byte), is_merge) for name, value, is_merge in likelihoods if value
        ],
    )


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


class EndedRun(BaseModel):
    """A run without a verdict. All of its text is untrusted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # name of the profile
    flow: str  # release, compare, sweep
    status: str  # status as used everywhere: refused, invalid, failed, nothing new
    message: str  # first text on the page
    finding: Finding | None = None  # of the check that ended the run
    exception: str = ""  # type and message of an unexpected exception
    log: str = ""  # file with the traceback
    stages: tuple[StageEnd, ...] = ()  # in the order of completion


def render_ending(content: EndedRun) -> str:
    """Return the page about the run as HTML, without scripts or external resources. Equal content gives equal text."""
    first, _, rest = content.message.partition("\n")
    consequence = _CONSEQUENCES.get(content.status, "")
    merged = any(end.stage == "merge" and end.status in ("made", "cached", "rebuilt") for end in content.stages)
    if merged and content.status in ("refused", "invalid"):
        consequence = f"This run published nothing. {_RESUMES}"
    return render_page(
        "ending.html",
        "ending.css",
        content=content,
        status=status_word(content.status),
        first=first,
        rest=rest,
        page_outcome=outcome_of_status(content.status),
        consequence=consequence,
        stages=content.stages,
    )


def add_stages(page: str, stages: Sequence[StageEnd]) -> str:
    """Return a report page with the stages of this run and their times, which a release must not contain.

    All calls of a stage share a row, because a stage may run once per model and task.
    """
    if not stages or _STAGES not in page:
        return page
    calls_by_stage: dict[str, list[StageEnd]] = {}
    for stage in stages:
        calls_by_stage.setdefault(stage.stage, []).append(stage)
    rows = []
    for name, calls in calls_by_stage.items():
        status = joint_status([(call.subject, call.status) for call in calls])
        cached = sum(call.status == "cached" for call in calls)
        summary = calls[0].summary if len(calls) == 1 else f"{len(calls)} calls, {cached} cached"
        rows.append(StageEnd(name, "", status, sum(call.seconds for call in calls), summary))
    table = environment().get_template("stages.html").render(stages=rows)
    section = f'<section id="stages">\n  <h2>Stages of this run</h2>\n{table}</section>'
    return add_contents(page.replace(_STAGES, section, 1))
