"""The artifact store, and what makes it trustworthy: canonical keys, remembered hashes, durable writes, locks,
journals of unfinished work, and what becomes of state that is damaged and of disks that are full.
"""

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
from merge_core.store.records import JOURNAL, JournalPlace, LineChain, RecordJournal, keep_only_journal, open_journal
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
from merge_core.store.store import MANIFEST, VALUE, Artifact, Store, StoredValue, StoreMiss

__all__ = [
    "ASIDE",
    "HASHES",
    "JOURNAL",
    "MANIFEST",
    "VALUE",
    "Artifact",
    "Damaged",
    "FileIdentity",
    "HashMemo",
    "JournalPlace",
    "LineChain",
    "NotInKey",
    "RecordJournal",
    "StateFinding",
    "Store",
    "StoreMiss",
    "StoredValue",
    "canonical",
    "digest",
    "disk_refusal",
    "examine_database",
    "examine_store",
    "family_prefix",
    "file_identity",
    "found_damaged",
    "fsync",
    "fsync_directories",
    "is_of_disk",
    "keep_only_journal",
    "lock_file",
    "locked",
    "make_way",
    "mend_state",
    "merkle",
    "open_journal",
    "passed_over",
    "read_state",
    "refusing_disk",
    "regular_files",
    "remove_any",
    "require_unchanged",
    "set_aside",
    "set_sqlite_aside",
    "sha256_file",
    "size_of",
    "sqlite_fault",
    "stage_key",
    "state_directory",
    "try_open_locked",
    "unlock_file",
    "write_state",
]
