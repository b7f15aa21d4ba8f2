"""Which files of a directory, or of a repository, are the checkpoint: by name alone, so before anything is downloaded.

A repository often holds its weights several times (safetensors and pickles, in shards and in one file, for another
library). Only those that ``merge_core.open_checkpoint`` would read decide what the model does; only they are
downloaded, and only they are in its digest. So a checkpoint has one digest, whatever else lies beside it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

from mergegate.merge_core.adapters import CONFIG_FILE
from mergegate.merge_core.checkpoint import (
    INDEX_NAME,
    PICKLED_INDEX_NAME,
    PICKLED_SINGLE_NAME,
    SINGLE_NAME,
    is_module_file,
    nested_names,
    travels,
)
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import FileIdentity, file_identity, require_unchanged
from mergegate.merge_core.parsing import JsonBounds, check_entries, read_json

# Configuration, tokenizer, templates, custom code.
_BESIDE = (".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")
_INDEX_BOUNDS = JsonBounds(size=64 << 20)
_ABOUT = re.compile(r"readme\.md|(licen[cs]e|copying|notice|use[_-]?policy)[^/]*", re.IGNORECASE)


def weight_files(names: Collection[str], directory: Path) -> tuple[str, ...]:
    """The weights among ``names``, as ``merge_core.open_checkpoint`` would choose them.

    Args:
        names: Of all files there are, relative, with ``/``.
        directory: Where the index lies, if ``names`` has one.

    Raises:
        InvalidInput: An index that is not JSON.
    """
    names = [name for name in names if not is_module_file(name)]  # of a layer that is not merged
    if any(name.endswith(".safetensors") for name in names):
        index, single = INDEX_NAME, SINGLE_NAME
        loose = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    else:
        index, single = PICKLED_INDEX_NAME, PICKLED_SINGLE_NAME
        loose = [name for name in names if re.fullmatch(r"pytorch_model[^/]*\.bin", name)]
    if index in names:
        # What an index says is a stranger's word: only files that there are count.
        return tuple(sorted(_named_by(directory / index) & set(names)))
    return (single,) if single in names else tuple(sorted(loose))


def deciding_files(directory: Path) -> tuple[str, ...]:
    """Names of the files in ``directory`` that decide what the model there does.

    Raises:
        InvalidInput: An index that is not JSON.
    """
    names = files_in(directory)
    return tuple(sorted({*weight_files(names, directory), *files_beside(names)}))


def identify_files(directories: Iterable[Path]) -> dict[Path, FileIdentity]:
    """Identities of the files that decide what the models there do, for ``require_same_files``.

    Raises:
        InvalidInput: An index that is not JSON.
    """
    return {
        directory / name: file_identity(directory / name)
        for directory in directories
        for name in deciding_files(directory)
    }


def require_same_files(looked: Mapping[Path, FileIdentity]) -> None:
    """See that nothing was done to the files since ``identify_files``: for commands that pin nothing.

    Raises:
        ChangedInput: Something was.
    """
    for path, identity in looked.items():
        require_unchanged(path, identity)


def without_model(named: str, directory: Path) -> InvalidInput | None:
    """Why there is no model in ``directory``; None: there may be one. To be asked before anything else: of what is no
    model nobody asks for a licence or a tokenizer.

    Args:
        named: As the user wrote it.
    """
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError:
        return None  # whoever opens it says why not
    if "config.json" in names:
        return None
    if CONFIG_FILE in names:
        return InvalidInput(
            named,
            found="no config.json: it is an adapter",
            expected="a model, or a model with an adapter",
            remedy=f"write in front of it what it was made from: BASE+{named}",
        )
    return InvalidInput(
        named,
        found="no config.json" if names else "no config.json: the directory is empty",
        expected="a checkpoint: config.json, weights and a tokenizer",
        remedy="correct the path, or finish the download",
    )


def files_beside(names: Collection[str]) -> tuple[str, ...]:
    """Everything among ``names`` but weights that decides what the model does."""
    return tuple(sorted(name for name in names if _decides(PurePosixPath(name))))


def files_about(names: Collection[str]) -> tuple[str, ...]:
    """The card, licences and notices among ``names``: they decide what may be done with the model."""
    return tuple(sorted(name for name in names if _ABOUT.fullmatch(name)))


def files_in(directory: Path) -> tuple[str, ...]:
    """Names of the files in ``directory`` that may belong to a checkpoint there.

    Raises:
        InvalidInput: An index that is not JSON; a file that is none, or is a link that leads out of the directory.
    """
    there = {path.name for path in directory.iterdir()}
    there |= set(nested_names(directory))
    # All that will be hashed, read or given to a library, before any of it is opened.
    check_entries(directory, sorted(name for name in there if _is_read(PurePosixPath(name))))
    found = {name for name in there if (directory / name).is_file()}
    for index in {INDEX_NAME, PICKLED_INDEX_NAME} & found:  # its shards may lie deeper
        names = map(PurePosixPath, _named_by(directory / index))
        inside = [name for name in names if not name.is_absolute() and ".." not in name.parts]
        named_files = {name.as_posix() for name in inside if "\0" not in str(name)}
        check_entries(directory, sorted(named_files))
        found |= {name for name in named_files if (directory / name).is_file()}
    return tuple(sorted(found))


def _named_by(index: Path) -> set[str]:
    """What an index calls files: of 50,000 tensors they are a few hundred."""
    named = read_json(index, bounds=_INDEX_BOUNDS).get("weight_map")
    return set(map(str, named.values())) if isinstance(named, dict) else set()


def _is_read(name: PurePosixPath) -> bool:
    return _decides(name) or name.suffix in (".safetensors", ".bin") or _ABOUT.fullmatch(name.name) is not None


def _decides(name: PurePosixPath) -> bool:
    """Return whether a file other than weights is part of what the model does.

    More files count than a merge carries: digests must not depend on what a merge happens to leave out.
    """
    if travels(name.as_posix()):
        return True
    return len(name.parts) == 1 and not name.name.startswith(".") and name.suffix in _BESIDE
