"""Processes of ours: they end with everything they started, and reach no more than they need.

``SupervisedProcess`` is one that is sure to end (``supervised``). ``Confinement`` says what one may reach that runs
what strangers wrote, and ``environment_of_child`` what it may see of our environment (``confinement``).
"""

from tasks.processes.confinement import Confinement, environment_of_child
from tasks.processes.supervised import Gpus, NotStarted, ProcessEnd, SupervisedProcess

__all__ = ["Confinement", "Gpus", "NotStarted", "ProcessEnd", "SupervisedProcess", "environment_of_child"]
