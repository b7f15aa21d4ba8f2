"""What makes a function a stage: a Prefect task with a content key, whose artifact lies in the store; and who is told.

Declare a stage with ``@stage``, an uncached step with ``@step``. A judgement returns a ``Verdict``.
"""

from mergegate.tasks.stage.combined import report_together
from mergegate.tasks.stage.environment import Runtime, device_kind, formats_without_units, runtime, versions
from mergegate.tasks.stage.limits import Limits, TimeSpan, limited, memory_of_child
from mergegate.tasks.stage.logs import logged_for_machines
from mergegate.tasks.stage.looking import WorkToDo, about_to, looking
from mergegate.tasks.stage.progress import (
    HeldProgress,
    NotedProgress,
    ProgressLog,
    StageEnd,
    StageStatus,
    advance,
    announce,
    is_watched,
    joint_status,
    noted_stages,
    report_stage,
    retell,
    running_stage,
    say_progress,
    watched_by,
)
from mergegate.tasks.stage.project import home, nearest
from mergegate.tasks.stage.pulse import Pace, Pulse
from mergegate.tasks.stage.reading import LostArtifact, PinnedInput, also_forget, read_pinned, require_pinned
from mergegate.tasks.stage.sharing import said_what_arrived
from mergegate.tasks.stage.stages import (
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
from mergegate.tasks.stage.usage import (
    QUOTA,
    bytes_made,
    keep_quota,
    note_stage,
    noted_run,
    runs_directory,
    store_quota,
)
from mergegate.tasks.stage.verdict import JointVerdict, Outcome, Section, Verdict, combined, severity, word_for, worst

__all__ = [
    "QUOTA",
    "DeclaredStage",
    "HeldProgress",
    "JointVerdict",
    "Limits",
    "LostArtifact",
    "NotedProgress",
    "Outcome",
    "Pace",
    "PinnedInput",
    "ProgressLog",
    "Pulse",
    "Runtime",
    "Section",
    "Stage",
    "StageEnd",
    "StageFuture",
    "StageStatus",
    "StageValue",
    "TimeSpan",
    "ValueStage",
    "Verdict",
    "WorkToDo",
    "about_to",
    "advance",
    "also_forget",
    "announce",
    "bytes_made",
    "combined",
    "device_kind",
    "formats_without_units",
    "home",
    "is_watched",
    "joint_status",
    "keep_quota",
    "limited",
    "logged_for_machines",
    "looking",
    "memory_of_child",
    "nearest",
    "note_stage",
    "noted_run",
    "noted_stages",
    "read_pinned",
    "report_stage",
    "report_together",
    "require_pinned",
    "retell",
    "running_stage",
    "runs_directory",
    "runtime",
    "said_what_arrived",
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
