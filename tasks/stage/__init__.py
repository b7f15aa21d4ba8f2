"""Turn functions into stages: Prefect tasks with a content key, a stored artifact and progress reports.

Declare a stage with ``@stage`` and an uncached step with ``@step``. A stage that judges a merge returns a ``Verdict``.
"""

from mergegate.tasks.stage.dry_run_pass import WorkRequired, dry_pass, require_work_allowed
from mergegate.tasks.stage.environment import Runtime, device_kind, formats_without_units, runtime, versions
from mergegate.tasks.stage.input_guard import LostArtifact, on_input_change, require_pinned
from mergegate.tasks.stage.limits import Limits, TimeSpan, apply_limits, memory_of_child
from mergegate.tasks.stage.progress import (
    DeferredProgress,
    ProgressLog,
    RecordedProgress,
    RelayedProgress,
    StageEnd,
    StageStatus,
    Watcher,
    advance,
    announce,
    current_watcher,
    describe_progress,
    join_progress,
    joint_status,
    progress_watcher,
    relay_progress,
    report_stage,
    running_stage,
)
from mergegate.tasks.stage.project import home, log_shared_store_savings, nearest_directory
from mergegate.tasks.stage.pulse import Pace, Pulse
from mergegate.tasks.stage.stages import (
    StageValue,
    separate_store,
    stage,
    step,
    store,
    value_stage,
)
from mergegate.tasks.stage.usage import (
    created_bytes,
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
    worst_verdict,
)

__all__ = [
    "DeferredProgress",
    "JointVerdict",
    "Limits",
    "LostArtifact",
    "Outcome",
    "Pace",
    "ProgressLog",
    "Pulse",
    "RecordedProgress",
    "RelayedProgress",
    "Runtime",
    "Section",
    "StageEnd",
    "StageStatus",
    "StageValue",
    "TimeSpan",
    "Verdict",
    "Watcher",
    "WorkRequired",
    "advance",
    "announce",
    "apply_limits",
    "combine_verdicts",
    "created_bytes",
    "current_watcher",
    "describe_progress",
    "device_kind",
    "dry_pass",
    "formats_without_units",
    "home",
    "join_progress",
    "joint_status",
    "keep_quota",
    "log_shared_store_savings",
    "memory_of_child",
    "nearest_directory",
    "on_input_change",
    "progress_watcher",
    "record_run",
    "record_stage",
    "relay_progress",
    "report_stage",
    "require_pinned",
    "require_work_allowed",
    "running_stage",
    "runs_directory",
    "runtime",
    "separate_store",
    "severity",
    "stage",
    "step",
    "store",
    "store_quota",
    "value_stage",
    "versions",
    "worst_verdict",
]
