"""Verify published releases, recompute their verdicts, reproduce them, and load them as the champion or anchor."""

from mergegate.tasks.publish.releases.champion import ReleasedModel, load_released_model
from mergegate.tasks.publish.releases.recompute import RecomputedVerdict
from mergegate.tasks.publish.releases.reproduce import ReproducedRelease, rebuild_release, rebuild_variants
from mergegate.tasks.publish.releases.verify import VerifiedRelease, check_release
