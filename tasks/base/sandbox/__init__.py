"""Supervised and confined child processes.

Programs that load third-party code run here: without secrets, without network access unless they need it, and with
limits on memory and time. The package also shares the GPUs of a host between processes.
"""

from mergegate.tasks.base.sandbox.confinement import Confinement, environment_of_child
from mergegate.tasks.base.sandbox.gpu_lock import GpuLease, acquire_gpus
from mergegate.tasks.base.sandbox.preparation import compile_imports
from mergegate.tasks.base.sandbox.programs import ProgramEnd, ProgramLimits, run_program
from mergegate.tasks.base.sandbox.supervision import (
    Gpus,
    NotStarted,
    ProcessEnd,
    ProcessOptions,
    SupervisedProcess,
    output_tail,
    require_linux,
)
