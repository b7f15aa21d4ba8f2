"""The artifact store, and what makes it trustworthy: canonical keys, remembered hashes, durable writes, locks,
journals of unfinished work.
"""

from merge_core.store.durable import fsync, fsync_directories
from merge_core.store.hashing import FileIdentity, HashMemo, file_identity, sha256_file
from merge_core.store.keys import NotInKey, canonical, digest, family_prefix, merkle, stage_key
from merge_core.store.locks import lock_file, locked, try_open_locked, unlock_file
from merge_core.store.records import JOURNAL, JournalPlace, RecordJournal, open_journal
from merge_core.store.store import MANIFEST, VALUE, Artifact, Store, StoredValue, StoreMiss

__all__ = [
    "JOURNAL",
    "MANIFEST",
    "VALUE",
    "Artifact",
    "FileIdentity",
    "HashMemo",
    "JournalPlace",
    "NotInKey",
    "RecordJournal",
    "Store",
    "StoreMiss",
    "StoredValue",
    "canonical",
    "digest",
    "family_prefix",
    "file_identity",
    "fsync",
    "fsync_directories",
    "lock_file",
    "locked",
    "merkle",
    "open_journal",
    "sha256_file",
    "stage_key",
    "try_open_locked",
    "unlock_file",
]
