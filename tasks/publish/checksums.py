"""SHA256SUMS: the sha256 of every file that is there before it, in the form that ``sha256sum --check`` reads.

It is what notices an edited ``provenance.json``, which cannot list itself. It cannot notice that both were edited: that
takes a version that is the content (the directory or tag is then named by a hash over all files, this one too), or a
signature, which is made last and signs this file as any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from mergegate.tasks.publish.content import ReleaseFile


def checksums(files: Iterable[ReleaseFile]) -> str:
    """The text of the file, sorted by name."""
    return checksums_text({file.name: file.sha256 for file in files})


def checksums_text(hashes: Mapping[str, str]) -> str:
    """The same from name -> sha256."""
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items()))


def parse_checksums(text: str) -> dict[str, str]:
    """name -> sha256. Lines of another form are no entries: whoever compares finds their files unlisted."""
    entries = (line.split("  ", 1) for line in text.splitlines())
    return {entry[1]: entry[0] for entry in entries if len(entry) == 2}


def sha256_of(data: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(data).hexdigest()
