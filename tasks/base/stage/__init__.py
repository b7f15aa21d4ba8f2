"""Turn functions into stages: Prefect tasks with a content key, a stored artifact and progress reports.

Declare a stage with ``@stage`` and an uncached step with ``@step``. A stage that judges a merge returns a ``Verdict``.
"""

from mergegate.tasks.base.stage.dry_run_pass import WorkRequired, dry_pass, require_work_allowed
from mergegate.tasks.base.stage.environment import Runtime, device_kind, formats_without_units, runtime, versions
from mergegate.tasks.base.stage.input_guard import LostArtifact, PinnedInput, on_input_change, require_pinned
from mergegate.tasks.base.stage.limits import Limits, TimeSpan, apply_limits, memory_of_child, memory_of_mapping_child
from mergegate.tasks.base.stage.progress import (
    DeferredProgress,
    Pace,
    ProgressLog,
    Pulse,
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
from mergegate.tasks.base.stage.project import (
    created_bytes,
    home,
    keep_quota,
    log_shared_store_savings,
    nearest_directory,
    record_run,
    record_stage,
    runs_directory,
    store_quota,
)
from mergegate.tasks.base.stage.stages import StageValue, separate_store, stage, step, store, value_stage
from mergegate.tasks.base.stage.verdict import (
    JointVerdict,
    Outcome,
    Section,
    Verdict,
    combine_verdicts,
    severity,
    worst_verdict,
)
