"""Build the page of a release that is tested on user traffic: the evidence so far, and the result.

::

    html = render_shadow(ShadowContent(...))
    html = render_shadow(content.without_examples())      # for long-term storage: without text from users
    shadow_sentence(content)                              # 'watched for 31 h: …', for the terminal
"""

from mergegate.tasks.report.shadow.content import LostExample, ReportedArm, ShadowContent, ShadowPoint
from mergegate.tasks.report.shadow.page import render_shadow
from mergegate.tasks.report.shadow.wording import (
    ARM_COLUMNS,
    arm_cells,
    shadow_outcome,
    shadow_rows,
    shadow_sentence,
)

__all__ = [
    "ARM_COLUMNS",
    "LostExample",
    "ReportedArm",
    "ShadowContent",
    "ShadowPoint",
    "arm_cells",
    "render_shadow",
    "shadow_outcome",
    "shadow_rows",
    "shadow_sentence",
]
