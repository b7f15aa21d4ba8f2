"""Targets to which a release can be published, and the contract that they implement.

Other packages register targets under the entry point ``mergegate.targets``.
"""

from mergegate.tasks.publish.targets.contract import (
    ALIAS_NAME,
    CredentialUse,
    CurrentRelease,
    OnProgress,
    PublishedRelease,
    PublishRequest,
    PublishTarget,
    Release,
    check_target,
)
from mergegate.tasks.publish.targets.registry import Target, find_release, publish_targets

__all__ = [
    "ALIAS_NAME",
    "CredentialUse",
    "CurrentRelease",
    "OnProgress",
    "PublishRequest",
    "PublishTarget",
    "PublishedRelease",
    "Release",
    "Target",
    "check_target",
    "find_release",
    "publish_targets",
]
