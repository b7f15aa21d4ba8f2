"""Write and parse SHA256SUMS: the sha256 of every file written before it, in the format of ``sha256sum --check``.

It reveals an edited ``provenance.json``, which cannot list itself. It does not reveal that both were edited. That takes
either a version that is a content hash (the directory or tag is named by a hash over all files, including this one) or
a signature, which is written last and covers this file too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from mergegate.tasks.publish.content import ReleaseFile


def checksums(files: Iterable[ReleaseFile]) -> str:
    """Return the content of SHA256SUMS, sorted by file name."""
    return checksums_text({file.name: file.sha256 for file in files})


def checksums_text(hashes: Mapping[str, str]) -> str:
    """Return the content of SHA256SUMS for a mapping of file name to sha256."""
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items()))


def parse_checksums(text: str) -> dict[str, str]:
    """Return the sha256 of each file by name. Malformed lines are skipped, so their files count as unlisted."""
    entries = (line.split("  ", 1) for line in text.splitlines())
    return {entry[1]: entry[0] for entry in entries if len(entry) == 2}


def sha256_of(data: bytes) -> str:
    """Return the sha256 of ``data`` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()
