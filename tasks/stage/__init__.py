"""What makes a function a stage: a Prefect task with a content key, whose artifact lies in the store; and who is told.

Declare a stage with ``@stage``, an uncached step with ``@step``. A judgement returns a ``Verdict``.
"""

from tasks.stage.combined import report_together
from tasks.stage.environment import Runtime, device_kind, runtime, versions
from tasks.stage.progress import ProgressLog, StageStatus, advance, announce, is_watched, watched_by
from tasks.stage.project import home, nearest
from tasks.stage.stages import StageValue, stage, step, store

__all__ = [
    "ProgressLog",
    "Runtime",
    "StageStatus",
    "StageValue",
    "advance",
    "announce",
    "device_kind",
    "home",
    "is_watched",
    "nearest",
    "report_together",
    "runtime",
    "stage",
    "step",
    "store",
    "versions",
    "watched_by",
]
