"""Turn functions into stages: Prefect tasks that have a content key, store their artifact and report their progress.

Declare a stage with ``@stage`` and an uncached step with ``@step``. A stage that judges a merge returns a ``Verdict``.
"""

from mergegate.tasks.stage.dry_run_pass import WorkRequired, dry_pass, require_work_allowed
from mergegate.tasks.stage.environment import Runtime, device_kind, formats_without_units, runtime, versions
from mergegate.tasks.stage.input_guard import LostArtifact, PinnedInput, on_input_change, read_pinned, require_pinned
from mergegate.tasks.stage.joint_progress import join_progress
from mergegate.tasks.stage.limits import Limits, TimeSpan, limited, memory_of_child
from mergegate.tasks.stage.logs import logged_for_machines
from mergegate.tasks.stage.progress import (
    DeferredProgress,
    ProgressLog,
    RecordedProgress,
    StageEnd,
    StageStatus,
    advance,
    announce,
    is_watched,
    joint_status,
    progress_watcher,
    recorded_stages,
    relay_progress,
    report_stage,
    running_stage,
    say_progress,
)
from mergegate.tasks.stage.project import home, nearest
from mergegate.tasks.stage.pulse import Pace, Pulse
from mergegate.tasks.stage.shared_store import log_shared_store_savings
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
    record_run,
    record_stage,
    runs_directory,
    store_quota,
)
from mergegate.tasks.stage.verdict import (
    JointVerdict,
    Outcome,
    Section,
    Verdict,
    combine_verdicts,
    severity,
    verdict_word,
    worst_verdict,
)

__all__ = [
    "QUOTA",
    "DeclaredStage",
    "DeferredProgress",
    "JointVerdict",
    "Limits",
    "LostArtifact",
    "Outcome",
    "Pace",
    "PinnedInput",
    "ProgressLog",
    "Pulse",
    "RecordedProgress",
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
    "WorkRequired",
    "advance",
    "announce",
    "bytes_made",
    "combine_verdicts",
    "device_kind",
    "dry_pass",
    "formats_without_units",
    "home",
    "is_watched",
    "join_progress",
    "joint_status",
    "keep_quota",
    "limited",
    "log_shared_store_savings",
    "logged_for_machines",
    "memory_of_child",
    "nearest",
    "on_input_change",
    "progress_watcher",
    "read_pinned",
    "record_run",
    "record_stage",
    "recorded_stages",
    "relay_progress",
    "report_stage",
    "require_pinned",
    "require_work_allowed",
    "running_stage",
    "runs_directory",
    "runtime",
    "say_progress",
    "severity",
    "stage",
    "step",
    "store",
    "store_quota",
    "value_stage",
    "verdict_word",
    "versions",
    "worst_verdict",
]
