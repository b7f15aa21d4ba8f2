"""Durable files: atomic writes, hashes, locks, and state that survives a crash.

mergegate uses this package for everything that it writes and later reads back. Each file is written next to its final
path, flushed to the disk and renamed. Damaged caches are built again.
"""

from mergegate.merge_core.files.hashing import (
    HASHES,
    FileIdentity,
    HashMemo,
    file_identity,
    require_unchanged,
    sha256_file,
)
from mergegate.merge_core.files.locks import hold_lock, lock_file, try_open_locked, unlock_file
from mergegate.merge_core.files.new_directory import (
    MARK,
    MARK_CONTENT,
    disk_errors_refused,
    disk_refusal,
    finish_directory,
    has_mark,
    is_disk_error,
    new_directory,
    remove_contents,
)
from mergegate.merge_core.files.records import (
    JOURNAL,
    JournalLocation,
    LineChain,
    RecordJournal,
    keep_only_journal,
    open_journal,
    open_journal_file,
    opened_journals,
)
from mergegate.merge_core.files.state import (
    ASIDE,
    Damaged,
    fsync,
    fsync_directories,
    is_set_aside,
    is_temporary,
    read_state,
    regular_files,
    remove_any,
    remove_damaged,
    remove_sqlite,
    set_aside_damaged,
    sqlite_fault,
    state_directory,
    user_cache,
    write_state,
)
