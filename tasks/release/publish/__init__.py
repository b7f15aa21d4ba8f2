"""Publish a release: define its files, and bring all of them to a target in one atomic step."""

from mergegate.tasks.release.publish.content import (
    CARD,
    KEYLESS_SIGNATURE,
    PROVENANCE,
    RECIPE,
    SIGNATURE,
    ReleaseFile,
    read_document,
    stored_files,
)
from mergegate.tasks.release.publish.documents.card_metadata import released_kind
from mergegate.tasks.release.publish.documents.facts import DatasetFacts, MergeRelease
from mergegate.tasks.release.publish.documents.release_parts import (
    PassedVariant,
    ReleaseParts,
    VariantParts,
    variant_content,
)
from mergegate.tasks.release.publish.public_names import PublicNames, recipe_paths
from mergegate.tasks.release.publish.settings import ApprovalSettings
from mergegate.tasks.release.publish.signing import Signer, SignerPolicy, expected_signer
from mergegate.tasks.release.publish.stage import (
    PendingRelease,
    describe_merge,
    joint_digest,
    pending_release,
    publish,
    published_merge,
    release_digest,
    require_approved,
)
from mergegate.tasks.release.publish.targets import Release
