"""Where a release goes. A target is one file that keeps the contract: check, current release, publish, open."""

from tasks.publish.targets.check import check_target
from tasks.publish.targets.directory import LATEST
from tasks.publish.targets.hub_current import current_release
from tasks.publish.targets.hub_state import KEPT
from tasks.publish.targets.settings import TARGETS, HubTarget, Target

__all__ = [
    "KEPT",
    "LATEST",
    "TARGETS",
    "HubTarget",
    "Target",
    "check_target",
    "current_release",
]
