"""Select the files of a directory or repository that form the checkpoint.

The selection uses only file names and the weight index, so it works before the weights are downloaded. A repository
often holds its weights several times: as safetensors and pickles, in shards and in one file, or for another library.
Only the files that ``merge_core.open_checkpoint`` would read determine the model's behavior. mergegate downloads only
those and includes only those in the digest, so unrelated files in the same directory do not change the digest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from mergegate.merge_core.adapters import CONFIG_FILE
from mergegate.merge_core.checkpoint import (
    INDEX_NAME,
    MODULES_FILE,
    PICKLED_INDEX_NAME,
    PICKLED_SINGLE_NAME,
    SINGLE_NAME,
    is_copyable,
    is_module_file,
    nested_names,
)
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import FileIdentity, require_unchanged
from mergegate.merge_core.parsing import JsonBounds, check_entries, read_json

# Suffixes of configuration, tokenizer, templates and custom code.
_BESIDE = (".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")
_INDEX_BOUNDS = JsonBounds(size=64 << 20)
_ABOUT = re.compile(r"readme\.md|(licen[cs]e|copying|notice|use[_-]?policy)[^/]*", re.IGNORECASE)


def weight_files(names: Collection[str], directory: Path) -> tuple[str, ...]:
    """Return the weight files among ``names`` that ``merge_core.open_checkpoint`` would read.

    ``names`` are relative, with ``/`` as the separator. If they include an index, it is read from ``directory``.

    Raises:
        InvalidInput: The index is not JSON.
    """
    names = [name for name in names if not is_module_file(name)]  # Files of module directories are not merged.
    if any(name.endswith(".safetensors") for name in names):
        index, single = INDEX_NAME, SINGLE_NAME
        loose = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    else:
        index, single = PICKLED_INDEX_NAME, PICKLED_SINGLE_NAME
        loose = [name for name in names if re.fullmatch(r"pytorch_model[^/]*\.bin", name)]
    if index in names:
        # The index is untrusted input, so names of files that do not exist are ignored.
        return tuple(sorted(_indexed_files(directory / index) & set(names)))
    return (single,) if single in names else tuple(sorted(loose))


def deciding_files(directory: Path) -> tuple[str, ...]:
    """Return the names of the files in ``directory`` that determine the behavior of the model.

    Raises:
        InvalidInput: An index is not JSON, an entry is not a regular file, or a link leads out of the directory.
    """
    entries = {path.name for path in directory.iterdir()}
    entries |= set(nested_names(directory))
    # Check every file that will be hashed, read or passed to a library before any of them is opened.
    read_names = (
        name
        for name in entries
        if _determines_behavior(PurePosixPath(name))
        or PurePosixPath(name).suffix in (".safetensors", ".bin")
        or _ABOUT.fullmatch(PurePosixPath(name).name)
    )
    check_entries(directory, sorted(read_names))
    files = {name for name in entries if (directory / name).is_file()}
    for index in {INDEX_NAME, PICKLED_INDEX_NAME} & files:  # The shards of an index may be in subdirectories.
        names = map(PurePosixPath, _indexed_files(directory / index))
        inside = [name for name in names if not name.is_absolute() and ".." not in name.parts]
        shards = {name.as_posix() for name in inside if "\0" not in str(name)}
        check_entries(directory, sorted(shards))
        files |= {name for name in shards if (directory / name).is_file()}
    return tuple(sorted({*weight_files(files, directory), *files_beside(files)}))


def require_same_files(identities: Mapping[Path, FileIdentity]) -> None:
    """Raise ``ChangedInput`` if a file has another identity than ``identify_parents`` returned for it."""
    for path, identity in identities.items():
        require_unchanged(path, identity)


def find_model_problem(reference: str, directory: Path) -> InvalidInput | None:
    """Return an error if ``directory`` does not contain a model, or None if it may contain one.

    Call this before any other check, so that a directory without a model is not reported for a missing license or
    tokenizer. ``reference`` is the text that the user wrote for the model.
    """
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError:
        return None  # Opening the model raises an error with the reason.
    if names & {"config.json", MODULES_FILE}:
        return None
    if CONFIG_FILE in names:
        return InvalidInput(
            reference,
            found="it is an adapter and has no config.json",
            expected="a model, or a model with an adapter",
            remedy=f"write BASE+{reference}, with the model that the adapter was trained on as BASE",
        )
    return InvalidInput(
        reference,
        found="it has no config.json" if names else "the directory is empty",
        expected="a checkpoint: config.json, weights and a tokenizer",
        remedy="correct the path, or complete the download",
    )


def files_beside(names: Collection[str]) -> tuple[str, ...]:
    """Return the files among ``names``, other than weights, that determine the model's behavior."""
    return tuple(sorted(name for name in names if _determines_behavior(PurePosixPath(name))))


def files_about(names: Collection[str]) -> tuple[str, ...]:
    """Return the card, licenses and notices among ``names``, which determine the permitted uses of the model."""
    return tuple(sorted(name for name in names if _ABOUT.fullmatch(name)))


def _indexed_files(index: Path) -> set[str]:
    """Return the distinct file names in an index."""
    weight_map = read_json(index, bounds=_INDEX_BOUNDS).get("weight_map")
    return set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()


def _determines_behavior(name: PurePosixPath) -> bool:
    """Return whether a file other than weights affects the model's behavior.

    This includes files that a merge does not copy, so that digests do not depend on what a merge copies.
    """
    if is_copyable(name.as_posix()):
        return True
    return len(name.parts) == 1 and not name.name.startswith(".") and name.suffix in _BESIDE
