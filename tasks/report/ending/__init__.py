"""Build the page of a run that ended without a verdict: refused by a check, invalid, failed, or without new work.

::

    html = render_ending(EndedRun(name=…, status="refused", message=…, finding=…, stages=…))
"""

from mergegate.tasks.report.ending.content import EndedRun, EndedStage
from mergegate.tasks.report.ending.page import render_ending

__all__ = ["EndedRun", "EndedStage", "render_ending"]
