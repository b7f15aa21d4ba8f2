"""The artifact store, and what makes it trustworthy: canonical keys, remembered hashes, durable writes, locks,
journals of unfinished work, what stays and what may go; and what becomes of state that is damaged and of disks that
are full.
"""

from merge_core.store.arrival import ARRIVING, NotAsListed, receive_directory
from merge_core.store.collection import (
    CollectedGarbage,
    collect_garbage,
    keeping_reasons,
    list_store,
    plan_collection,
    store_bytes,
)
from merge_core.store.database import set_sqlite_aside, sqlite_fault
from merge_core.store.disk import disk_refusal, is_of_disk, refusing_disk
from merge_core.store.durable import fsync, fsync_directories
from merge_core.store.hashing import HASHES, FileIdentity, HashMemo, file_identity, require_unchanged, sha256_file
from merge_core.store.inspection import (
    StateFinding,
    examine_database,
    examine_store,
    found_damaged,
    mend_state,
    passed_over,
    size_of,
)
from merge_core.store.keys import NotInKey, canonical, digest, family_prefix, merkle, stage_key
from merge_core.store.locks import lock_file, locked, try_open_locked, unlock_file
from merge_core.store.manifest import MANIFEST
from merge_core.store.new_directory import (
    MARK,
    MARK_CONTENT,
    finish_directory,
    has_mark,
    new_directory,
    remove_contents,
)
from merge_core.store.records import JOURNAL, JournalPlace, LineChain, RecordJournal, keep_only_journal, open_journal
from merge_core.store.retention import RELEASED, EntryName, RetentionPlan, RetentionRule, RunUse, StoreEntry
from merge_core.store.runs import (
    OpenRun,
    forget_profile,
    note_made,
    note_use,
    open_run,
    prune_runs,
    read_run,
    read_runs,
)
from merge_core.store.shared import SharedStore, require_shared
from merge_core.store.state import (
    ASIDE,
    Damaged,
    make_way,
    read_state,
    regular_files,
    remove_any,
    set_aside,
    state_directory,
    write_state,
)
from merge_core.store.store import VALUE, Artifact, Store, StoredValue, StoreMiss

__all__ = [
    "ARRIVING",
    "ASIDE",
    "HASHES",
    "JOURNAL",
    "MANIFEST",
    "MARK",
    "MARK_CONTENT",
    "RELEASED",
    "VALUE",
    "Artifact",
    "CollectedGarbage",
    "Damaged",
    "EntryName",
    "FileIdentity",
    "HashMemo",
    "JournalPlace",
    "LineChain",
    "NotAsListed",
    "NotInKey",
    "OpenRun",
    "RecordJournal",
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
    "disk_refusal",
    "examine_database",
    "examine_store",
    "family_prefix",
    "file_identity",
    "finish_directory",
    "forget_profile",
    "found_damaged",
    "fsync",
    "fsync_directories",
    "has_mark",
    "is_of_disk",
    "keep_only_journal",
    "keeping_reasons",
    "list_store",
    "lock_file",
    "locked",
    "make_way",
    "mend_state",
    "merkle",
    "new_directory",
    "note_made",
    "note_use",
    "open_journal",
    "open_run",
    "passed_over",
    "plan_collection",
    "prune_runs",
    "read_run",
    "read_runs",
    "read_state",
    "receive_directory",
    "refusing_disk",
    "regular_files",
    "remove_any",
    "remove_contents",
    "require_shared",
    "require_unchanged",
    "set_aside",
    "set_sqlite_aside",
    "sha256_file",
    "size_of",
    "sqlite_fault",
    "stage_key",
    "state_directory",
    "store_bytes",
    "try_open_locked",
    "unlock_file",
    "write_state",
]
