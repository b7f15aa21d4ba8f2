"""Publish a release: define its files, and bring all of them to a target in one atomic step."""

from mergegate.tasks.publish.card_scores import escape
from mergegate.tasks.publish.content import (
    BOM,
    CARD,
    DESCRIPTION_FILES,
    PROVENANCE,
    RECIPE,
    SIGNATURE,
    SUMS,
    VERSION_DIGITS,
    ReleaseFile,
    checksums_text,
    parse_checksums,
    stored_files,
)
from mergegate.tasks.publish.license_files import state_license_files
from mergegate.tasks.publish.public_names import PublicNames, recipe_paths
from mergegate.tasks.publish.settings import ApprovalSettings
from mergegate.tasks.publish.signature import public_key, read_signature
from mergegate.tasks.publish.stage import PendingRelease, ReleaseParts, pending_release, publish
from mergegate.tasks.publish.targets import Release

__all__ = [
    "BOM",
    "CARD",
    "DESCRIPTION_FILES",
    "PROVENANCE",
    "RECIPE",
    "SIGNATURE",
    "SUMS",
    "VERSION_DIGITS",
    "ApprovalSettings",
    "PendingRelease",
    "PublicNames",
    "Release",
    "ReleaseFile",
    "ReleaseParts",
    "checksums_text",
    "escape",
    "parse_checksums",
    "pending_release",
    "public_key",
    "publish",
    "read_signature",
    "recipe_paths",
    "state_license_files",
    "stored_files",
]
