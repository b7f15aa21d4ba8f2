"""Change a file during a run: several ways that change the model, and some that leave its bytes the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def other_bytes(file: Path) -> bytes:
    """Return the file's content with the last two bytes changed."""
    content = file.read_bytes()
    return content[:-2] + bytes(byte ^ 1 for byte in content[-2:])


def flip(file: Path, at: int = -1) -> None:
    """Flip one bit of the byte at a position."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def overwrite(file: Path) -> None:
    """Change the file in place and restore its modification time."""
    status, content = file.stat(), other_bytes(file)
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(file: Path) -> None:
    """Rename another file with the same times over the file."""
    status, other = file.stat(), file.with_name("other.bin")
    other.write_bytes(other_bytes(file))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(file)


def link(file: Path) -> None:
    """Replace the file with a symlink to another file."""
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
    """Leave the file alone and add a file next to it that readers treat as part of the model."""
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
    """Rename a copy of the file over it."""
    other = file.with_name("other.bin")
    shutil.copyfile(file, other)
    other.rename(file)


HARMLESS: dict[str, Callable[[Path], None]] = {
    "touched": Path.touch,
    "written again": lambda file: file.write_bytes(file.read_bytes()) and None,
    "copied over": copy_over,
    "made executable": lambda file: file.chmod(0o755),
}
