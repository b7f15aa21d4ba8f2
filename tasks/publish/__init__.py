"""Publish a release: define its files, and bring them to their target in one atomic step."""

from mergegate.tasks.publish.approval import ApprovalSettings, PendingRelease
from mergegate.tasks.publish.card_scores import escaped
from mergegate.tasks.publish.checksums import checksums_text, parse_checksums, sha256_of
from mergegate.tasks.publish.content import (
    ABOUT,
    BOM,
    CARD,
    PROVENANCE,
    RECIPE,
    SIGNATURE,
    SUMS,
    ReleaseFile,
    content_version_from_sums,
    stored_files,
)
from mergegate.tasks.publish.public_names import PublicNames, recipe_paths
from mergegate.tasks.publish.signature import public_key, read_signature
from mergegate.tasks.publish.state_license_files import state_license_files
from mergegate.tasks.publish.step import ReleaseParts, pending_release, publish
from mergegate.tasks.publish.targets import Release

__all__ = [
    "ABOUT",
    "BOM",
    "CARD",
    "PROVENANCE",
    "RECIPE",
    "SIGNATURE",
    "SUMS",
    "ApprovalSettings",
    "PendingRelease",
    "PublicNames",
    "Release",
    "ReleaseFile",
    "ReleaseParts",
    "checksums_text",
    "content_version_from_sums",
    "escaped",
    "parse_checksums",
    "pending_release",
    "public_key",
    "publish",
    "read_signature",
    "recipe_paths",
    "sha256_of",
    "state_license_files",
    "stored_files",
]
