"""Publish a release: define its files, and bring all of them to a target in one atomic step."""

from mergegate.tasks.publish.card_metadata import released_kind
from mergegate.tasks.publish.card_scores import escape
from mergegate.tasks.publish.content import (
    BOM,
    CARD,
    KEYLESS_SIGNATURE,
    PROVENANCE,
    RECIPE,
    SIGNATURE,
    SUMS,
    VERSION_DIGITS,
    ReleaseFile,
    checksums_text,
    parse_checksums,
    read_document,
    stored_files,
)
from mergegate.tasks.publish.facts import DatasetFacts
from mergegate.tasks.publish.keyless import Signer, SignerPolicy, expected_signer, read_keyless
from mergegate.tasks.publish.provenance import MergeRelease
from mergegate.tasks.publish.public_names import PublicNames, recipe_paths
from mergegate.tasks.publish.settings import ApprovalSettings
from mergegate.tasks.publish.signature import public_key, read_signature
from mergegate.tasks.publish.stage import (
    PendingRelease,
    ReleaseParts,
    describe_merge,
    joint_digest,
    pending_release,
    publish,
    release_digest,
    require_approved,
)
from mergegate.tasks.publish.targets import Release
from mergegate.tasks.publish.variants import PassedVariant, VariantParts, published_merge, variant_content
