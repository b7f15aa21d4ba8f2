"""What is outside this process: processes of ours that end with everything they started and reach no more than they
need, and servers that speak JSON over HTTP.

``SupervisedProcess`` is a process that is sure to end (``supervised``). ``Confinement`` says what one may reach that
runs what strangers wrote, and ``environment_of_child`` what it may see of our environment (``confinement``). How a
server is asked, and what is asked again, is in ``remote``.
"""

from tasks.outside.confinement import Confinement, environment_of_child
from tasks.outside.remote import (
    TRANSIENT_STATUSES,
    Answer,
    JsonClient,
    Unreachable,
    causes,
    is_transient,
    retrying,
    status_of,
)
from tasks.outside.supervised import Gpus, NotStarted, ProcessEnd, SupervisedProcess

__all__ = [
    "TRANSIENT_STATUSES",
    "Answer",
    "Confinement",
    "Gpus",
    "JsonClient",
    "NotStarted",
    "ProcessEnd",
    "SupervisedProcess",
    "Unreachable",
    "causes",
    "environment_of_child",
    "is_transient",
    "retrying",
    "status_of",
]
