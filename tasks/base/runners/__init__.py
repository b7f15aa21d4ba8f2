"""Process independent items in parallel, in local threads or on a Dask or Ray cluster."""

from mergegate.tasks.base.runners.runner import Runner, RunnerSettings, local_runner, open_runner
from mergegate.tasks.base.runners.slots import (
    Cancelled,
    WorkerSlot,
    current_slot,
    end_slot,
    on_slot_end,
    slots_for,
    use_slot,
    visible_gpus,
)
