"""What is outside this process: processes of ours that end with everything they started and reach no more than they
need, and servers that speak JSON over HTTP.

``SupervisedProcess`` is a process that is sure to end (``supervised``). ``Confinement`` says what one may reach that
runs what strangers wrote, and ``environment_of_child`` what it may see of our environment (``confinement``);
``compile_imports`` spares it compiling what it imports (``bytecode``). How a server is asked, and what is asked again,
is in ``remote``. ``open_runner`` has independent work done side by side, here or on a cluster (``runner``,
``cluster``); ``current_slot`` is where a thread of ours does it (``slots``). ``run_program`` has a program run that a
model wrote (``programs``). ``hold_gpus`` keeps other jobs off the GPUs of this host (``gpu_lock``). ``require_linux``
says what needs it (``linux``).
"""

from mergegate.tasks.outside.bytecode import compile_imports
from mergegate.tasks.outside.confinement import Confinement, environment_of_child
from mergegate.tasks.outside.gpu_lock import HeldGpus, hold_gpus, take_gpus
from mergegate.tasks.outside.linux import require_linux
from mergegate.tasks.outside.programs import ProgramEnd, ProgramLimits, run_program
from mergegate.tasks.outside.remote import (
    TRANSIENT_STATUSES,
    Answer,
    JsonClient,
    Unreachable,
    causes,
    is_transient,
    plain_address,
    retrying,
    status_of,
)
from mergegate.tasks.outside.runner import Runner, RunnerSettings, here, open_runner
from mergegate.tasks.outside.slots import GivenUp, Slot, also_end, at_slot, current_slot, end_slot, slots_for
from mergegate.tasks.outside.supervised import Gpus, NotStarted, ProcessEnd, SupervisedProcess

__all__ = [
    "TRANSIENT_STATUSES",
    "Answer",
    "Confinement",
    "GivenUp",
    "Gpus",
    "HeldGpus",
    "JsonClient",
    "NotStarted",
    "ProcessEnd",
    "ProgramEnd",
    "ProgramLimits",
    "Runner",
    "RunnerSettings",
    "Slot",
    "SupervisedProcess",
    "Unreachable",
    "also_end",
    "at_slot",
    "causes",
    "compile_imports",
    "current_slot",
    "end_slot",
    "environment_of_child",
    "here",
    "hold_gpus",
    "is_transient",
    "open_runner",
    "plain_address",
    "require_linux",
    "retrying",
    "run_program",
    "slots_for",
    "status_of",
    "take_gpus",
]
