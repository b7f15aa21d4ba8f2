"""What may be done to a file under a run: other bytes in many ways, and the same bytes touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def other_bytes(file: Path) -> bytes:
    """As many bytes, the last ones flipped."""
    content = file.read_bytes()
    return content[:-2] + bytes(byte ^ 1 for byte in content[-2:])


def overwrite(file: Path) -> None:
    """In place, and the time of modification put back."""
    status, content = file.stat(), other_bytes(file)
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(file: Path) -> None:
    """By another file, renamed, with the same times."""
    status, other = file.stat(), file.with_name("other.bin")
    other.write_bytes(other_bytes(file))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(file)


def link(file: Path) -> None:
    """A link to another file in its place."""
    other = file.with_name("other.bin")
    other.write_bytes(other_bytes(file))
    file.unlink()
    file.symlink_to(other.name)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def append(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b" ")


def add(file: Path) -> None:
    """Nothing is done to it; another file comes beside it that a reader would take for a part of the model."""
    (file.parent / "chat_template.jinja").write_text(f"{{# {os.urandom(4).hex()} #}}")


CHANGES: dict[str, Callable[[Path], None]] = {
    "overwritten, time put back": overwrite,
    "replaced": replace,
    "linked": link,
    "truncated": truncate,
    "appended": append,
    "removed": Path.unlink,
    "joined by another": add,
}


def copy_over(file: Path) -> None:
    """The same bytes in another file, renamed."""
    other = file.with_name("other.bin")
    shutil.copyfile(file, other)
    other.rename(file)


HARMLESS: dict[str, Callable[[Path], None]] = {
    "touched": Path.touch,
    "written again": lambda file: file.write_bytes(file.read_bytes()) and None,
    "copied over": copy_over,
    "made executable": lambda file: file.chmod(0o755),
}
