"""Files of our own that may hold anything by now: read as a value, as damage, or as not there; damage is set aside.

Everything below the project's home and the store can be made again, so nothing that is found there may stop a run. One
rule for all of it: whoever reads gets a value or learns that there is none, and what is in the way of the next one is
renamed to ``<name>.damaged-<n>``, for a person to look at::

    match read_state(path, Manifest.model_validate_json):
        case Damaged() as damage: ...        # garbage, a directory, a loop of links, not readable: set it aside
        case None: ...                       # not there
        case manifest: ...

What says something of the machine rather than of the file (no descriptor left, no memory) is raised. Setting aside
needs a directory that can be written; where it cannot, that is raised too, because nothing could be built there.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import TypeVar

from mergegate.merge_core.files.durable import fsync

ASIDE = ".damaged-"
# A name with the number of the writing process, and perhaps of its thread; a name from ``tempfile``; a key.
_TEMPORARY = re.compile(r"(.+\.\d+(-\d+)?|(runner|probe)-.+|[0-9a-f]{32}(\..+)?)\.partial")
# Of each name the newest few are kept, and of each not more than this: a checkpoint is not worth a second copy.
KEPT, KEPT_BYTES = 3, 64 << 20
# No state of ours is larger; what is, is none.
MOST_BYTES = 1 << 30

# What a reader trips over in content that is not what it should be.
_NOT_PARSED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
# What opening says of the file itself; anything else (EMFILE, ENOMEM) is said of the machine.
_OF_THE_FILE = {
    errno.ELOOP: "a link, where a file should be",
    errno.EISDIR: "a directory, where a file should be",
    errno.ENXIO: "no file",
    errno.ENODEV: "no file",
    errno.EACCES: "not readable by this user",
    errno.EPERM: "not readable by this user",
    errno.EIO: "not readable: the disk fails",
    errno.ENAMETOOLONG: "not readable: its name is too long",
}

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Damaged:
    """State that cannot be believed: where it lies, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path} cannot be read: {self.why}"


def read_state(path: Path, parse: Callable[[bytes], T], *, most: int = MOST_BYTES) -> T | Damaged | None:
    """What ``parse`` makes of the file at ``path``; None where nothing is there.

    Args:
        path: A regular file. Links are not followed, pipes and devices not waited for.
        parse: Raises what parsers raise for what it does not know.
        most: Bytes; a longer file is damaged.

    Raises:
        OSError: when the machine is at its limits; it says nothing of the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in _OF_THE_FILE:
            return Damaged(path, _OF_THE_FILE[error.errno])
        raise
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return Damaged(path, f"a {_kind(status.st_mode)}, where a file should be")
            if status.st_size > most:
                return Damaged(path, f"{status.st_size} bytes, at most {most} are expected")
            content = file.read()
        return parse(content)
    except OSError as error:  # of reading: a disk that fails, a directory on systems that open it
        if error.errno in _OF_THE_FILE:
            return Damaged(path, _OF_THE_FILE[error.errno])
        raise
    except _NOT_PARSED as error:
        said = " ".join(str(error).split())
        return Damaged(path, said[:200] or type(error).__name__)
    finally:
        os.close(descriptor)


def move_aside(path: Path) -> Path | None:
    """Rename whatever is at ``path``; where it is now, or None if nothing was there or it was too large to keep.

    A link is renamed itself, what it points to is left alone.
    """
    place = path.with_name(f"{path.name}{ASIDE}{_last_number(path) + 1}")
    try:
        path.rename(place)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        remove_any(path)
        return None
    for old in _set_aside_before(place)[:-KEPT]:
        remove_any(old)
    _shrink(place)
    return place if _is_there(place) else None


def is_misplaced(path: Path, *, through_links: bool = False) -> bool:
    """Whether something is at ``path`` that is no file. One look: what somebody removes meanwhile is not in the way.

    Args:
        through_links: A link to a file counts as one.
    """
    try:
        status = path.stat() if through_links else path.lstat()
    except OSError:  # nothing, or a link that leads nowhere
        return path.is_symlink()
    return not stat.S_ISREG(status.st_mode)


def is_set_aside(path: Path) -> bool:
    """Return whether ``path`` has a name that only :func:`move_aside` gives."""
    return ASIDE in path.name and _number(path) > 0


def is_temporary(path: Path) -> bool:
    """Return whether ``path`` has a name that mergegate gives to a file of which only a part is written."""
    return _TEMPORARY.fullmatch(path.name) is not None


def set_aside_damaged(path: Path, why: str) -> None:
    """Set aside what is at ``path`` and cannot be believed, with a line in the log. Nothing there: nothing said."""
    if _is_there(path):
        place = move_aside(path)
        _log.warning("%s: %s; %s", path, why, f"set aside as {place.name}" if place else "removed")


def state_directory(path: Path, *, private: bool = False) -> Path:
    """Make the directory ``path`` and those above it; what stands in its place and is no directory is set aside.

    Args:
        path: Its own name is ours: a file or a broken link under it is damage. Those above it are not.
        private: For its owner alone, and for its group where it has the setgid bit, as directories that a team shares
            have. One that is there already and ours is changed.
    """
    mode = 0o700 if private else 0o777
    if not path.is_dir():
        for missing in reversed([above for above in path.parents if not above.exists()]):
            missing.mkdir(mode=mode, exist_ok=True)
        # Tried before anything is moved: others make the same directory at the same moment.
        try:
            path.mkdir(mode=mode, exist_ok=True)
        except FileExistsError:
            set_aside_damaged(path, "no directory")
            path.mkdir(mode=mode, exist_ok=True)
    if private:
        _close_to_others(path)
    return path


def write_state(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` in one step, flushed to the disk. A directory in the way is set aside."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            partial.rename(path)  # in place of a file, a link or a pipe
        except IsADirectoryError:
            set_aside_damaged(path, "a directory, where a file should be")
            partial.rename(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def remove_any(path: Path) -> None:
    """Delete whatever is at ``path``: a file, a link, a directory with all in it, also one that may not be read."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_once_more)
    else:
        path.unlink(missing_ok=True)


def regular_files(directory: Path) -> tuple[set[str], set[str]]:
    """Relative names of all files below ``directory``; and of what is neither file nor directory (links, pipes)."""
    files: set[str] = set()
    others: set[str] = set()
    for above, directories, names in os.walk(directory):
        for name in (*names, *directories):
            path = Path(above, name)
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                (files if stat.S_ISREG(mode) else others).add(path.relative_to(directory).as_posix())
    return files, others


def _is_there(path: Path) -> bool:
    """Also a link that leads nowhere."""
    return os.path.lexists(path)


def _set_aside_before(place: Path) -> list[Path]:
    """All of what has been set aside of the same name, oldest first."""
    name = place.name.rpartition(ASIDE)[0]
    found = [other for other in place.parent.iterdir() if other.name.rpartition(ASIDE)[0] == name]
    return sorted((other for other in found if _number(other) > 0), key=_number)


def _last_number(path: Path) -> int:
    try:
        before = _set_aside_before(path.with_name(f"{path.name}{ASIDE}0"))
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return _number(before[-1]) if before else 0


def _number(aside: Path) -> int:
    text = aside.name.rpartition(ASIDE)[2]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _shrink(place: Path) -> None:
    """Remove the largest files of what was set aside until the rest is small. Best effort: it may not be ours."""
    with suppress(OSError):
        if not place.is_dir() or place.is_symlink():
            if place.lstat().st_size > KEPT_BYTES:
                place.unlink()
            return
        files = sorted((file.lstat().st_size, file) for file in (place / name for name in regular_files(place)[0]))
        total = sum(size for size, _ in files)
        while files and total > KEPT_BYTES:
            size, file = files.pop()
            file.unlink()
            total -= size


def _close_to_others(path: Path) -> None:
    status = path.stat()
    wanted = stat.S_IMODE(status.st_mode) & (0o7770 if status.st_mode & stat.S_ISGID else 0o7700)
    if status.st_uid == os.geteuid() and wanted != stat.S_IMODE(status.st_mode):
        path.chmod(wanted)


def _once_more(function: Callable[[str], object], path: str, failure: object) -> None:
    """What may not be looked into may still be ours to open up."""
    Path(path).parent.chmod(0o700)
    if not Path(path).is_symlink():
        Path(path).chmod(0o700)
    if function in (os.unlink, os.rmdir):
        function(path)
    else:
        shutil.rmtree(path)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for is_a, name in kinds if is_a(mode)), "device")
