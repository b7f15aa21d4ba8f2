"""Store artifacts under the hash of everything that determines them.

A stage requests the artifact of a key from the store and builds it once if it is missing. The package also decides
which artifacts garbage collection may remove, records which run uses which artifacts, and exchanges artifacts with a
shared store.
"""

from mergegate.tasks.store.collection import (
    CollectedGarbage,
    collect_garbage,
    explain_retention,
    list_store,
    plan_collection,
    store_bytes,
)
from mergegate.tasks.store.inspection import (
    StateFinding,
    directory_bytes,
    examine_database,
    examine_store,
    is_leftover,
    mend_state,
    set_aside_count,
)
from mergegate.tasks.store.keys import NotInKey, canonical, digest, family_prefix, merkle, stage_key
from mergegate.tasks.store.manifest import MANIFEST
from mergegate.tasks.store.retention import RELEASED, EntryName, RetentionPlan, RetentionRule, RunUse, StoreEntry
from mergegate.tasks.store.runs import (
    OpenRun,
    forget_profile,
    open_run,
    prune_runs,
    read_run,
    read_runs,
    record_created,
    record_use,
)
from mergegate.tasks.store.shared import SharedStore, require_shared
from mergegate.tasks.store.store import VALUE, Artifact, Store, StoredValue, StoreMiss
from mergegate.tasks.store.transfer import ARRIVING, ContentMismatch, receive_directory

__all__ = [
    "ARRIVING",
    "MANIFEST",
    "RELEASED",
    "VALUE",
    "Artifact",
    "CollectedGarbage",
    "ContentMismatch",
    "EntryName",
    "NotInKey",
    "OpenRun",
    "RetentionPlan",
    "RetentionRule",
    "RunUse",
    "SharedStore",
    "StateFinding",
    "Store",
    "StoreEntry",
    "StoreMiss",
    "StoredValue",
    "canonical",
    "collect_garbage",
    "digest",
    "directory_bytes",
    "examine_database",
    "examine_store",
    "explain_retention",
    "family_prefix",
    "forget_profile",
    "is_leftover",
    "list_store",
    "mend_state",
    "merkle",
    "open_run",
    "plan_collection",
    "prune_runs",
    "read_run",
    "read_runs",
    "receive_directory",
    "record_created",
    "record_use",
    "require_shared",
    "set_aside_count",
    "stage_key",
    "store_bytes",
]
