"""What makes a function a stage: a Prefect task with a content key, whose artifact lies in the store; and who is told.

Declare a stage with ``@stage``, an uncached step with ``@step``. A judgement returns a ``Verdict``.
"""

from tasks.stage.combined import report_together
from tasks.stage.environment import Runtime, device_kind, runtime, versions
from tasks.stage.progress import (
    HeldProgress,
    ProgressLog,
    StageEnd,
    StageStatus,
    advance,
    announce,
    is_watched,
    report_stage,
    retell,
    say_progress,
    watched_by,
)
from tasks.stage.project import home, nearest
from tasks.stage.reading import LostArtifact, PinnedInput, also_forget, read_pinned, require_pinned
from tasks.stage.stages import (
    DeclaredStage,
    Stage,
    StageFuture,
    StageValue,
    ValueStage,
    stage,
    step,
    store,
    value_stage,
)
from tasks.stage.usage import QUOTA, keep_quota, note_stage, noted_run, runs_directory, store_quota
from tasks.stage.verdict import JointVerdict, Outcome, Section, Verdict, combined, severity, word_for, worst

__all__ = [
    "QUOTA",
    "DeclaredStage",
    "HeldProgress",
    "JointVerdict",
    "LostArtifact",
    "Outcome",
    "PinnedInput",
    "ProgressLog",
    "Runtime",
    "Section",
    "Stage",
    "StageEnd",
    "StageFuture",
    "StageStatus",
    "StageValue",
    "ValueStage",
    "Verdict",
    "advance",
    "also_forget",
    "announce",
    "combined",
    "device_kind",
    "home",
    "is_watched",
    "keep_quota",
    "nearest",
    "note_stage",
    "noted_run",
    "read_pinned",
    "report_stage",
    "report_together",
    "require_pinned",
    "retell",
    "runs_directory",
    "runtime",
    "say_progress",
    "severity",
    "stage",
    "step",
    "store",
    "store_quota",
    "value_stage",
    "versions",
    "watched_by",
    "word_for",
    "worst",
]
