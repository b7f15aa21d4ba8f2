"""Where a release goes. A target is one file that keeps the contract: check, current release, publish, open.

Other packages add theirs under the entry point ``mergegate.targets``.
"""

from mergegate.tasks.publish.targets.alias import ALIAS_NAME
from mergegate.tasks.publish.targets.contract import (
    CurrentRelease,
    OnProgress,
    PublishedRelease,
    PublishTarget,
    Release,
    check_target,
)
from mergegate.tasks.publish.targets.registry import Target, find_release, publish_targets

__all__ = [
    "ALIAS_NAME",
    "CurrentRelease",
    "OnProgress",
    "PublishTarget",
    "PublishedRelease",
    "Release",
    "Target",
    "check_target",
    "find_release",
    "publish_targets",
]
