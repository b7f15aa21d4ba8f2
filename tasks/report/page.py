"""Render the report page from ``template.html`` with Jinja2, which escapes all external text.

Other pages share its environment and its style: see ``page_template`` and ``page_style``.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.merge_core.errors import escape_invisible
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.report import explanation_text, heat_map, plots, variants, wording
from mergegate.tasks.report.content import ReportContent
from mergegate.tasks.report.table import compares_per_byte, costs, evaluated_models, likelihood, task_rows

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

_HERE = Path(__file__).parent
_CONTENTS = re.compile("<!--contents-->.*?<!--/contents-->", re.DOTALL)
_SECTION = re.compile(r'<section id="([\w-]+)">\s*<h2>(.*?)</h2>', re.DOTALL)


def render(content: ReportContent) -> str:
    """Return ``report.html`` as text, without scripts or external resources. Equal content gives equal text."""
    from markupsafe import Markup

    verdict, scoring, windows = content.verdict, content.scoring, content.windows
    models, rows = evaluated_models(content), task_rows(content)
    scored_how = read_how = ""
    if scoring:
        examples = "the tasks' own" if scoring.num_fewshot is None else str(scoring.num_fewshot)
        sample = f"a fixed random sample of documents, at first {scoring.first_look} per task"
        prompts = [f"{examples} few-shot examples", "chat template" if scoring.chat_template else "no chat template"]
        length = [f"at most {scoring.max_length} tokens"] if scoring.max_length else []
        by_text, library = content.kind.reads_text, content.kind.loading_library
        parts = [
            f"lm-eval, {scoring.backend} backend" if by_text else f"the model loaded by {library}",
            sample if scoring.first_look is not None else "all documents",
            *(prompts if by_text else []),
            f"dtype {scoring.dtype}",
            f"batch size {scoring.batch_size}",
            *(length if by_text else []),
        ]
        scored_how = ". ".join([", ".join(parts), *(f"{task} has {setup}" for task, setup in content.asked.items())])
        scored_how = ". ".join(filter(None, (scored_how, wording.selection_note(content).removesuffix("."))))
    # Each guarded task with the digest of its data and the datasets behind it, at their known commits:
    # ``gsm8k 3f2a… (openai/gsm8k at 9c1d…)``. Empty if no data was inspected.
    data_digests = {}
    for guard in verdict.all_guards:
        if guard.data is not None:
            sources = {f"{source.path} at {source.revision[:12]}" for source in guard.data.sources if source.revision}
            behind = f" ({', '.join(sorted(sources))})" if sources else ""
            data_digests[guard.task] = f"{guard.task} {guard.data.digest[:12]}{behind}"
    if windows:
        read_how = f"windows of {windows.max_length} tokens, dtype {windows.dtype}, batch size {windows.batch_size}"
    per_byte = compares_per_byte(content.models, verdict.drift)
    likelihoods = [(model.name, model.likelihoods, model.role == "merge") for model in content.models]
    if content.ensemble is not None:
        likelihoods.insert(-1, ("ensemble of the parents", content.ensemble, False))
    page = page_template("template.html").render(
        content=content,
        verdict=verdict,
        wording=wording,
        size=format_bytes,
        costs=costs(content),
        sentence=wording.sentence(content),
        style=page_style("reading.css", *(["variants.css"] if content.variants else [])),
        # Matplotlib draws these plots and escapes the names in them.
        guards_plot=[Markup(plot) for plot in plots.guards_plot(content)],
        drift_plot=[Markup(plot) for plot in plots.drift_plot(content)],
        variants_plot=[Markup(plot) for plot in plots.variants_plot(content)],
        judge_plot=[Markup(plot) for plot in plots.judge_plot(content)],
        interference_plot=[Markup(plot) for plot in heat_map.interference_plot(content)],
        explaining=explanation_text,
        heat_map=heat_map,
        variants=variants,
        variant_rows=variants.variant_rows(content),
        models=models,
        rows=rows,
        marked_answers=marked_answers,
        per_byte=per_byte,
        measured=[(name, likelihood(value, per_byte), merged) for name, value, merged in likelihoods if value],
        scored_how=scored_how,
        data_digests=", ".join(data_digests.values()),
        read_how=read_how,
    )
    return add_contents(page)


def add_contents(page: str) -> str:
    """Return a page whose table of contents links to its sections, in place of an earlier one."""
    items = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading in _SECTION.findall(page))
    nav = f'<!--contents--><nav class="contents" aria-label="Contents"><ul>{items}</ul></nav><!--/contents-->'
    return _CONTENTS.sub(lambda _: nav, page, count=1)


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
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: type(value)(escape_invisible(value)) if isinstance(value, str) else value,
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
