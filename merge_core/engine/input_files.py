"""Open input files when they are read, and keep only a limited number of them open.

A merge of many sharded checkpoints has more input files than a process may have open. The files that were used last
stay open. When a file is opened again, it must still be the same file with the same timestamps.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.files import FileIdentity, file_identity, require_unchanged
from mergegate.merge_core.system import open_file_limit

# Number of input files that stay open, and the share of the process's limit that they may use.
_MOST_OPEN = 256
_SHARE_OF_LIMIT = 0.25


class InputFiles:
    """The input files of a merge. Instances are thread-safe context managers.

    At most 256 files stay open, and at most a quarter of the number that the process may have open. In addition, each
    thread keeps the file open that it is reading.

    Args:
        paths: Paths of the files.
        locate: Function that returns the actual path of a file, or its open descriptor. Default: the path itself.

    Raises:
        InvalidInput: A file cannot be read.
        ChangedInput: On exit: a file was changed or replaced since the start.
    """

    def __init__(self, paths: Iterable[Path], locate: Callable[[Path], Path | int] = lambda path: path) -> None:
        self._lock = threading.Lock()
        self._limit = max(1, min(_MOST_OPEN, int(open_file_limit() * _SHARE_OF_LIMIT)))
        self._given: dict[Path, int] = {}  # Descriptors from ``locate``, which stay open.
        self._sources: dict[Path, Path] = {}
        self._open: dict[Path, int] = {}  # Least recently used first.
        self._readers: dict[Path, int] = {}  # Number of readers of each file that is being read.
        self._identities: dict[Path, FileIdentity] = {}
        try:
            for path in dict.fromkeys(paths):
                source = locate(path)
                if isinstance(source, int):
                    self._given[path] = os.dup(source)
                    self._identities[path] = file_identity(self._given[path])
                    continue
                self._sources[path] = source
                with self.open(path) as fd:
                    self._identities[path] = file_identity(fd)
        except BaseException:
            self._close()
            raise

    @property
    def identities(self) -> Mapping[Path, FileIdentity]:
        """Identity that each file had when it was opened for the first time."""
        return self._identities

    @contextmanager
    def open(self, path: Path) -> Iterator[int]:
        """Yield an open descriptor of a file. It is valid until the end of the ``with`` statement.

        Raises:
            InvalidInput: The file cannot be read.
            ChangedInput: The file was changed or replaced since it was opened for the first time.
        """
        if path in self._given:
            yield self._given[path]
            return
        with self._lock:
            fd = self._open.pop(path, -1)
            if fd < 0:
                fd = self._open_again(path)
            self._open[path] = fd
            self._readers[path] = self._readers.get(path, 0) + 1
            self._close_unused(self._limit)
        try:
            yield fd
        finally:
            with self._lock:
                self._readers[path] -= 1

    def __enter__(self) -> InputFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            # A changed file may be the cause of the error.
            if error is None or isinstance(error, MergegateError):
                for path, source in self._sources.items():
                    require_unchanged(source, self._identities[path], self._open.get(path))
        finally:
            self._close()

    def _open_again(self, path: Path) -> int:
        source, identity = self._sources[path], self._identities.get(path)
        try:
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._close_unused(0):
                return self._open_again(path)
            if identity is not None:
                require_unchanged(source, identity)
            raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
        if identity is not None:
            try:
                require_unchanged(source, identity, fd)
            except MergegateError:
                os.close(fd)
                raise
        return fd

    def _close_unused(self, limit: int) -> int:
        """Close files that no thread reads, until at most ``limit`` are open. Return the number of closed files."""
        excess = len(self._open) - limit
        unused = [path for path in self._open if not self._readers.get(path)][:excess] if excess > 0 else []
        for path in unused:
            os.close(self._open.pop(path))
        return len(unused)

    def _close(self) -> None:
        for fd in (*self._given.values(), *self._open.values()):
            os.close(fd)
        self._given.clear()
        self._open.clear()
