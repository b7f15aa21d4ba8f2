"""Write the report as a cached stage: the page, and the same content as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from mergegate.tasks.base.stage import StageValue, stage
from mergegate.tasks.base.store import canonical, without_unkeyed
from mergegate.tasks.release.report.content import ReportContent
from mergegate.tasks.release.report.page import render
from mergegate.tasks.release.report.wording import sentence, title

PAGE, DATA = "report.html", "report.json"


class Report(StageValue):
    """One-line summary of a report, whose artifact holds ``report.html`` and ``report.json``."""

    headline: str

    def summary(self) -> str:
        return f"{PAGE}: {self.headline.partition(':')[0]}"


@stage("report", version=5)
def write_report(out: Path, content: ReportContent) -> Report:
    """Write the report to ``out``. The bytes depend only on the stage's key.

    ``report.json`` is the canonical form of ``content`` with sorted keys. It leaves out everything that is not part of
    the key: paths, the names of models in the runs that measured them, and the cost of serving.
    """
    data = json.dumps(canonical(content), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    (out / DATA).write_bytes(f"{data}\n".encode())
    # The page leaves out the same fields, so that it is equal for all users.
    (out / PAGE).write_bytes(render(without_unkeyed(content)).encode())
    return Report(headline=" ".join(f"{title(content.verdict).lower()}: {sentence(content)}".split()))
