"""Store artifacts under the hash of everything that determines them.

A stage looks up an artifact by its key and builds it only if it is missing. The package also decides which artifacts
garbage collection may remove, records which artifacts each run uses, and exchanges artifacts with a shared store.
"""

from mergegate.tasks.base.store.collection import (
    RetentionPlan,
    RetentionRule,
    StoreEntry,
    collect_garbage,
    explain_retention,
    list_store,
    store_bytes,
)
from mergegate.tasks.base.store.inspection import (
    StateFinding,
    damaged_finding,
    directory_bytes,
    examine_database,
    examine_store,
    leftover_finding,
    mend_state,
)
from mergegate.tasks.base.store.manifest import (
    MANIFEST,
    ContentMismatch,
    NotInKey,
    canonical,
    digest,
    family_prefix,
    merkle,
    receive_directory,
    stage_key,
    without_unkeyed,
)
from mergegate.tasks.base.store.runs import (
    RELEASED,
    EntryName,
    OpenRun,
    RunUse,
    forget_runs,
    open_run,
    read_runs,
    record_created,
    record_use,
)
from mergegate.tasks.base.store.shared import SharedStore, require_shared
from mergegate.tasks.base.store.store import VALUE, Artifact, BuildCallbacks, Store, StoredValue, StoreMiss
