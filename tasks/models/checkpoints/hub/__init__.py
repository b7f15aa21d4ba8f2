"""Access the Hugging Face Hub: credentials, the files of a commit, and ranges of weight files."""

from mergegate.tasks.models.checkpoints.hub.access import (
    HubAccess,
    RemoteFile,
    describe_hub_error,
    git_blob,
    hub_access,
    is_offline,
    is_retryable,
    snapshots_directory,
)
from mergegate.tasks.models.checkpoints.hub.permissions import require_write_access
from mergegate.tasks.models.checkpoints.hub.snapshot import (
    RevisionList,
    Snapshot,
    element_reader,
    find_snapshot,
    list_revisions,
)
