"""Define the model that stages work on: a display name, a digest for cache keys, and a directory with the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import file_identity
from mergegate.tasks.checkpoints.files import deciding_files
from mergegate.tasks.store import MANIFEST, NotInKey, digest


class Model(BaseModel):
    """A checkpoint with known content.

    Two models with equal digests are the same model, even if their names or directories differ. A parent is therefore
    evaluated only once, across all runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        """Return the pinned sha256 of each file, by path, for ``tasks.stage.input_guard``."""
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
