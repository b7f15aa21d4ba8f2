"""Targets to which a release can be published, and the contract that they implement.

Other packages register targets under the entry point ``mergegate.targets``.
"""

from mergegate.tasks.release.publish.targets.contract import (
    CredentialUse,
    CurrentRelease,
    PublishedRelease,
    PublishRequest,
    PublishTarget,
    Release,
    check_target,
)
from mergegate.tasks.release.publish.targets.registry import Target, find_release, publish_targets
