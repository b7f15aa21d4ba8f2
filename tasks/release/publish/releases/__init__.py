"""Verify published releases, decide and build them again, export their results, and load them as champion or anchor."""

from mergegate.tasks.release.publish.releases.inspect_log import inspect_logs, read_release_results
from mergegate.tasks.release.publish.releases.origin import ReleasedModel, load_released_model
from mergegate.tasks.release.publish.releases.recompute import RecomputedVerdict
from mergegate.tasks.release.publish.releases.reproduce import ReproducedRelease, rebuild_release, rebuild_variants
from mergegate.tasks.release.publish.releases.verify import VerifiedRelease, check_release
