"""Decide which files of a release a rebuild must give, and compare rebuilt files with those of the release."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mergegate.merge_core.checkpoint import read_gguf_header, read_header
from mergegate.merge_core.errors import MergegateError, Refused
from mergegate.merge_core.parsing import open_buffered
from mergegate.tasks.publish.content import (
    DOCUMENTS,
    EVAL_RESULTS,
    FACTS,
    KEYLESS_SIGNATURE,
    MODIFICATIONS,
    SIGNATURE,
    SUMS,
)
from mergegate.tasks.publish.targets import PublishedRelease
from mergegate.tasks.stage import store

# Names of everything that mergegate writes about a model, in the only directories for it. Any other file is part of the
# model, because a library may load it: a tokenizer reads 'special_tokens_map.json' if there is one.
_DOCUMENTS = re.compile(
    "|".join(
        (
            *map(re.escape, (*DOCUMENTS, FACTS, MODIFICATIONS, SUMS, SIGNATURE, KEYLESS_SIGNATURE)),
            rf"LICENSE|NOTICE|licenses/[^/]+\.txt|{re.escape(EVAL_RESULTS)}[^/]+\.yaml",
            r"evidence/([^/]+/)?(gate\.json|outcomes\.parquet|likelihoods\.parquet)",
        )
    )
)
_CHUNK_BYTES = 1 << 20
_SHOWN = 5  # files that a message lists


def is_rebuilt(name: str) -> bool:
    """Return whether a rebuild must give a file of a release, because it is not a document of mergegate."""
    return not _DOCUMENTS.fullmatch(name)


def require_equal_files(
    release: PublishedRelease, listing: Mapping[str, tuple[int, str]], rebuilt: Mapping[str, Path], reason: str
) -> int:
    """Compare rebuilt files with a release that has the verified ``listing``, and return their size in bytes.

    ``rebuilt`` holds their paths by their names in the release. A file that ought to be rebuilt and was
    not counts as different.

    Raises:
        Refused: Files differ. The message names the first tensor that does, and ``reason`` as the remedy.
    """
    hashes = store().hashes
    actual = {name: (path.stat().st_size, hashes.sha256(path, trust=False)) for name, path in rebuilt.items()}
    compared = set(rebuilt) | {name for name in listing if is_rebuilt(name)}
    if different := sorted(name for name in compared if actual.get(name) != listing.get(name)):
        details = []
        for name in different[:_SHOWN]:
            detail = "it was not rebuilt" if name not in rebuilt else "the release does not have it"
            if name in rebuilt and name in listing:
                detail = ""
                with suppress(MergegateError):  # the release cannot be downloaded
                    detail = first_difference(release.download() / name, rebuilt[name])
            details.append(f"{name} ({detail})" if detail else name)
        raise Refused(
            f"{release.reference}: {different[0]}",
            found=f"{len(different)} of {len(compared)} rebuilt files differ: {', '.join(details)}",
            expected="the same bytes",
            remedy=reason,
        )
    return sum(size for size, _ in actual.values())


def first_difference(original: Path, rebuilt: Path) -> str:
    """Return which part of a file of weights differs first, such as 'tensor blk.0.attn_q.weight'.

    The text is empty if the format is not known, or if a file is damaged.
    """
    try:
        tensors, others = _tensors(original), _tensors(rebuilt)
        for name in {**tensors, **others}:
            if name not in tensors or name not in others:
                return f"tensor {name}, which only the {'release' if name in tensors else 'rebuilt file'} has"
            (kind, offset, nbytes), (other_kind, other_offset, _) = tensors[name], others[name]
            if kind != other_kind:
                return f"tensor {name}: {kind}, rebuilt {other_kind}"
            if _differ((original, offset), (rebuilt, other_offset), nbytes):
                return f"tensor {name}"
        if original.suffix == ".gguf":
            values, rebuilt_values = (read_gguf_header(path).metadata for path in (original, rebuilt))
            for key in {**values, **rebuilt_values}:
                if values.get(key) != rebuilt_values.get(key):
                    return f"metadata {key}"
    except (MergegateError, OSError):
        pass  # The hashes have shown that the files differ.
    return ""


def _tensors(path: Path) -> dict[str, tuple[str, int, int]]:
    """Return type and shape, position and number of bytes of each tensor in a file, by name."""
    if path.suffix == ".gguf":
        header = read_gguf_header(path)
        return {each.name: (f"{each.type} {list(each.shape)}", each.offset, each.nbytes) for each in header.tensors}
    if path.suffix == ".safetensors":
        stored = read_header(path)
        return {each.name: (f"{each.dtype.code} {list(each.shape)}", each.offset, each.nbytes) for each in stored}
    return {}


def _differ(first: tuple[Path, int], second: tuple[Path, int], nbytes: int) -> bool:
    """Return whether ``nbytes`` bytes differ, from a position in one file and from a position in another."""
    with open_buffered(first[0]) as one, open_buffered(second[0]) as other:
        one.seek(first[1])
        other.seek(second[1])
        for start in range(0, nbytes, _CHUNK_BYTES):
            count = min(_CHUNK_BYTES, nbytes - start)
            if one.read(count) != other.read(count):
                return True
    return False
