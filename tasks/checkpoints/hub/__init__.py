"""The Hugging Face Hub as every stage sees it: how to reach it, what a commit lists, headers without weights."""

from mergegate.tasks.checkpoints.hub.access import HubAccess, describe, hub_access, is_offline, is_worth_another_look
from mergegate.tasks.checkpoints.hub.cache import snapshots_place
from mergegate.tasks.checkpoints.hub.download import download_snapshots
from mergegate.tasks.checkpoints.hub.errors import all_at_once
from mergegate.tasks.checkpoints.hub.file import RemoteFile, git_blob
from mergegate.tasks.checkpoints.hub.permissions import require_writing
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot, find_snapshot

__all__ = [
    "HubAccess",
    "RemoteFile",
    "Snapshot",
    "all_at_once",
    "describe",
    "download_snapshots",
    "find_snapshot",
    "git_blob",
    "hub_access",
    "is_offline",
    "is_worth_another_look",
    "require_writing",
    "snapshots_place",
]
