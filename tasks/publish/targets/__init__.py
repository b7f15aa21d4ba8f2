"""Publishing targets: the places a release can go to. All implement one contract: check, current, publish, open.

Other packages register theirs under the entry point ``mergegate.targets``.
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
