"""Work with published releases: verify them, reproduce them, and load them as the champion or anchor."""

from mergegate.tasks.publish.releases.champion import ReleasedModel, load_released_model
from mergegate.tasks.publish.releases.reproduce import ReproducedRelease, rebuild_release
from mergegate.tasks.publish.releases.verify import VerifiedRelease, check_release

__all__ = [
    "ReleasedModel",
    "ReproducedRelease",
    "VerifiedRelease",
    "check_release",
    "load_released_model",
    "rebuild_release",
]
