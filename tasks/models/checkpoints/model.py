"""Define the model that stages work on: a display name, a digest for cache keys, and a directory with the files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel

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
from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.files import FileIdentity, file_identity, require_unchanged
from mergegate.merge_core.parsing import JsonBounds, check_entries, read_json
from mergegate.tasks.base.store import MANIFEST, NotInKey, digest


class Model(BaseModel, frozen=True, extra="forbid"):
    """A checkpoint with known content.

    Two models with equal digests are the same model, even if their names or directories differ. A parent is therefore
    evaluated only once, across all runs.
    """

    name: Annotated[str, NotInKey]  # Unique in a run, for example 'reverser' or 'merge'.
    digest: str  # 64 hex digits over the names, sizes and hashes of the files that determine the model's behavior.
    directory: Annotated[Path, NotInKey]  # Absolute path.
    # Name and sha256 of every file that is read from the directory, as pinned. Empty if the model is not pinned, which
    # is the case for models that are evaluated once and whose results are not cached.
    files: Annotated[tuple[tuple[str, str], ...], NotInKey] = ()
    # Whether loading the model runs the Python files in its directory. True if the profile trusts its repository at
    # its commit.
    runs_code: bool = False

    def content_key(self) -> object:
        # A model that runs its own code is a different model. The key is extended only in that case, so results from
        # before the setting existed keep their keys.
        return {"digest": self.digest} | ({"runs_code": True} if self.runs_code else {})

    @property
    def label(self) -> str:
        """Display name."""
        return self.name

    @property
    def tokenizer_directory(self) -> Path:
        """Directory with the tokenizer, the chat template and the configuration."""
        return self.directory

    def pinned_files(self) -> Mapping[Path, str]:
        """Return the pinned sha256 of each file, by path, for ``stage.input_guard``."""
        return {self.directory / name: sha256 for name, sha256 in self.files}

    def present(self) -> Iterable[Path]:
        """Return the files that a reader would read now, including files added after pinning."""
        try:
            names = deciding_files(self.directory)
        except (OSError, MergegateError):
            return ()  # In this case a pinned file has changed or is gone, and the caller notices that.
        return [self.directory / name for name in names if name != MANIFEST]


class QuantizedModel(Model):
    """A quantized form of a model, with the backend that evaluates it as it will be served.

    ``directory`` holds the quantized weights, and ``files`` pins them.
    """

    # The model that was quantized. If ``weights`` is set, the tokenizer is in its directory.
    source: Model
    backend: str  # Name of an evaluation backend: 'llama_cpp', 'hf' or 'vllm'.
    weights: str = ""  # File in ``directory`` that the backend loads. Empty: it loads the directory.
    # Versions and settings that determine the results, in addition to the libraries of the backend, by name: those of a
    # runtime in an environment of its own (``llama_cpp.runtime_versions``) or of the library that dequantizes the
    # weights. ``python`` is the interpreter of that environment.
    runtime: tuple[tuple[str, str], ...] = ()
    python: Annotated[Path | None, NotInKey] = None

    def content_key(self) -> object:
        key = {"digest": self.digest, "source": self.source, "backend": self.backend, "weights": self.weights}
        return key | ({"runtime": self.runtime} if self.runtime else {})

    @property
    def tokenizer_directory(self) -> Path:
        return self.source.tokenizer_directory if self.weights else self.directory

    def pinned_files(self) -> Mapping[Path, str]:
        return {**super().pinned_files(), **self.source.pinned_files()}


def files_fingerprint(models: Sequence[Model]) -> str:
    """Return a text that changes when a pinned file of ``models`` is modified, replaced or merely touched.

    Unfinished work is reused only if the fingerprint is the same, because no check confirms that a killed run had read
    the pinned bytes.
    """
    identities: list[object] = []
    for model in models:
        for path in sorted(model.pinned_files()):
            try:
                # The device number is left out because it can change when the machine boots.
                identities.append([path.name, *map(str, file_identity(path)[1:])])
            except OSError:
                identities.append([path.name])
    return digest(identities)


# Suffixes of configuration, tokenizer, templates and custom code.
_BESIDE = (".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")
_INDEX_BOUNDS = JsonBounds(size=64 << 20)
_ABOUT = re.compile(r"readme\.md|(licen[cs]e|copying|notice|use[_-]?policy)[^/]*", re.IGNORECASE)


def weight_files(names: Collection[str], directory: Path) -> tuple[str, ...]:
    """Return the weight files among ``names`` that ``merge_core.open_checkpoint`` would read.

    ``names`` are relative, with ``/`` as the separator. If they include an index, it is read from ``directory``.
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
    """Return the names of the files in ``directory`` that determine the behavior of the model."""
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
