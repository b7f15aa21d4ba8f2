"""Find the available targets: the built-in ones and those of the entry point ``mergegate.targets``.

The value of an entry point is a subclass of ``PublishTarget`` or a sequence of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import SelectedBy, collect_settings
from mergegate.tasks.release.publish.targets.contract import PublishedRelease, PublishTarget
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget
from mergegate.tasks.release.publish.targets.hub import HubTarget
from mergegate.tasks.release.publish.targets.mlflow import MlflowTarget
from mergegate.tasks.release.publish.targets.oci import OciTarget
from mergegate.tasks.release.publish.targets.s3 import S3Target

GROUP = "mergegate.targets"
_BUILT_IN: tuple[type[PublishTarget], ...] = (DirectoryTarget, HubTarget, S3Target, OciTarget, MlflowTarget)


@cache
def publish_targets() -> Mapping[str, type[PublishTarget]]:
    """Return every target by its name in a profile (``to``).

    Raise InvalidInput if an installed package registers an object that is not a target, or a name that is taken.
    """
    return collect_settings(PublishTarget, "to", _BUILT_IN, entry_points(group=GROUP), GROUP)


def find_release(reference: str) -> PublishedRelease:
    """Open the release that a user's reference names. A local directory takes precedence over other targets.

    Raise InvalidInput if there is no such release.
    """
    targets = publish_targets().values()
    try:
        if release := next(filter(None, (target.open(reference) for target in targets)), None):
            return release
    except Refused as error:
        raise InvalidInput(reference, found=error.found, expected=error.expected, remedy=error.remedy) from None
    raise InvalidInput(
        reference,
        found="no such directory",
        expected=", or ".join(target.reference_form for target in targets),
        remedy="check the spelling, the network, and HF_TOKEN for a private repository",
    )


Target = Annotated[PublishTarget, SelectedBy("to", publish_targets, default="directory")]
"""Type of a profile setting that selects a target."""
