"""Classify the files next to a model's config and weights by name, and select those that a merge copies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import (
    JsonBounds,
    check_entries,
    parse_json_object,
    parsing_errors,
    plain_file,
    read_plain,
)

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
MODULES_FILE = "modules.json"

Kind: TypeAlias = Literal[
    "tokenizer", "chat template", "generation settings", "processor", "code", "language adapter", "module", "other"
]
"""Purpose of a file. ``module`` means part of a sentence-transformers module, and ``other`` an unknown purpose."""

TEXT_KINDS: frozenset[Kind] = frozenset(("tokenizer", "chat template", "generation settings"))
"""Kinds of files that a merge copies from the model whose tokenizer it uses."""

_KINDS: tuple[tuple[Kind, str], ...] = (
    ("generation settings", r"generation_config\.json"),
    ("chat template", rf"[^/]*\.jinja|{TEMPLATE_FOLDER}/[^/]*\.jinja|chat_template\.json"),
    (
        "tokenizer",
        r"tokenizer[^/]*|special_tokens_map\.json|added_tokens\.json|merges\.txt|vocab\.[^/]*|tekken\.json"
        r"|[^/]*\.model|[^/]*\.tiktoken|[^/]*\.spm",
    ),
    ("processor", r"[^/]*processor_config\.json"),
    ("code", r"[^/]*\.py"),
    ("language adapter", r"adapter\.[^/]+\.safetensors"),  # MMS: layers and head for one language.
    (
        "module",
        r"modules\.json|sentence_[a-z]+_config\.json|config_sentence_transformers\.json"
        r"|\d+_\w+/[^/]+\.(?:json|txt|model|safetensors|bin)",
    ),
)
_KIND = re.compile("|".join(f"(?P<{kind.replace(' ', '_')}>{pattern})" for kind, pattern in _KINDS), re.DOTALL)
# Files from which a library can build a tokenizer. All other tokenizer files only extend these.
_VOCABULARY = re.compile(r"tokenizer\.json|vocab\.(json|txt)")
_BINARY_VOCABULARY = re.compile(r"[^/]*\.(model|tiktoken|spm)|tekken\.json|tokenizer\.model\.v\d+")
# Files of the kind "other" are pinned, downloaded and compared if they have one of these suffixes.
_PLAIN_SUFFIXES = (".json", ".txt")
# A merge is complete without these files. The pattern matches names in lower case.
_LEFTOVER = re.compile(
    r"config\.json|params\.json|.*\.index\.json"  # other layouts of config and weights
    # Weights under the usual names, also those of other formats. Under another name, they may be a part of the model.
    r"|(?:.*[-_.])?(?:model|consolidated|ggml|weights|training_args|params|checkpoint|states)(?:[-_.]\w*\d[-\w.]*)?"
    r"\.(?:safetensors|bin|pt|pth|ckpt)"
    r"|.*\.(h5|msgpack|onnx|onnx_data|gguf|ggml|ot|tflite|pdparams|nemo)"
    r"|adapter_(model|config)\..*|quant\w*_config\.json|hf_quant_config\.json|pytorch_model.*"
    r"|(training|trainer)_.*|(optimizer|scheduler|scaler)\..*|rng_state.*|random_states.*|events\.out\..*|latest"
    r"|.*_results\.json|.*\.log|.*\.ya?ml|requirements.*\.txt|.*\.sh|.*\.ipynb"
    r"|(readme|licen[cs]e|copying|notice|use[_-]?policy|citation|authors|changelog).*|.*\.(md|rst|bib|pdf)"
    r"|.*\.(png|jpe?g|gif|svg|webp|ico|mp4|webm|mp3|wav)|\..*|.*~"
    r"|(bom|provenance)\.json|sha256sums|model\.sig|manifest\.json|value\.json"  # of a mergegate release
    r"|(original|onnx|openvino|coreml|gguf|ggml|metal|runs|wandb|logs?|assets|figures|figs|images?|imgs?|media|docs"
    r"|examples|eval\w*|__pycache__|checkpoint-\d+|global_step\d+|\..*)/",
    re.DOTALL,
)
_MOST_BYTES = 256 << 20  # The largest tokenizers have 33 MB.


def companion_kind(name: str) -> Kind | None:
    """Return the kind of the file called ``name``, or None if a merge is complete without it."""
    if (match := _KIND.fullmatch(name)) is not None:
        return match.lastgroup.replace("_", " ") if match.lastgroup else None  # type: ignore[return-value]
    return None if _LEFTOVER.fullmatch(name.lower()) else "other"


def is_copyable(name: str) -> bool:
    """Return whether a merge may copy the file called ``name``. The model's digest covers all such files."""
    kind = companion_kind(name)
    return kind is not None and (kind != "other" or ("/" not in name and name.endswith(_PLAIN_SUFFIXES)))


def is_module_file(name: str) -> bool:
    """Return whether ``name`` is a file in the folder of a sentence-transformers module, such as ``1_Pooling``."""
    return "/" in name and companion_kind(name) == "module"


def is_binary_vocabulary(name: str) -> bool:
    """Return whether only SentencePiece, tiktoken or mistral-common can read the vocabulary file ``name``."""
    return _BINARY_VOCABULARY.fullmatch(name) is not None


def is_template_file(name: str) -> bool:
    """Return whether transformers reads a chat template from files called ``name``."""
    return name in (TEMPLATE_FILE, "chat_template.json") or name.startswith(f"{TEMPLATE_FOLDER}/")


def has_vocabulary(names: Collection[str]) -> bool:
    """Return whether files with these names suffice to load a tokenizer."""
    return any(_VOCABULARY.fullmatch(name) or is_binary_vocabulary(name) for name in names)


def nested_names(directory: Path) -> list[str]:
    """List the files in the template and module folders of a checkpoint, as ``folder/name``."""
    names = []
    for folder in os.listdir(directory):  # noqa: PTH208  # Only the names are needed.
        if _has_companions(folder) and (directory / folder).is_dir():
            names += [f"{folder}/{name}" for name in os.listdir(directory / folder)]  # noqa: PTH208
    return names


@dataclass(frozen=True)
class Companions:
    """Files that belong to a model in addition to its config and weights.

    ``sources`` maps each file name to the directory that contains the file, or to bytes that are yet to be written.
    """

    sources: Mapping[str, Path | bytes] = field(default_factory=dict, repr=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __contains__(self, name: object) -> bool:
        return name in self.sources

    def location(self, name: str) -> str:
        source = self.sources.get(name, b"")
        return name if isinstance(source, bytes) else str(source / name)

    def read(self, name: str, most: int = _MOST_BYTES, expected: str = "a file of the checkpoint") -> bytes:
        """Return the content of the file called ``name``, of at most ``most`` bytes (default: 256 MiB).

        Error messages describe the content as ``expected``.
        """
        source = self.sources[name]
        if isinstance(source, bytes):
            return source
        return read_plain(source / name, most, within=source, expected=expected)

    def json(self, name: str, bounds: JsonBounds | None = None) -> dict[str, Any] | None:
        """Return the JSON object in the file called ``name``, or None if the model has no such file."""
        if name not in self.sources:
            return None
        bounds = bounds or JsonBounds()
        return parse_json_object(self.read(name, bounds.size), self.location(name), bounds=bounds)

    def text(self, name: str, most: int, expected: str) -> str:
        """Return the text of the file called ``name``, with the arguments of :meth:`read`."""
        try:
            return self.read(name, most, expected).decode()
        except UnicodeDecodeError:
            raise InvalidInput(self.location(name), found="the file is not UTF-8 text", expected=expected) from None

    def nbytes(self) -> int:
        return sum(
            len(source) if isinstance(source, bytes) else plain_file(source / name, within=source).stat().st_size
            for name, source in self.sources.items()
        )

    def only(self, matches: Callable[[str], bool]) -> Companions:
        return Companions({name: source for name, source in self.sources.items() if matches(name)})

    def with_changes(self, changes: Mapping[str, Path | bytes | None]) -> Companions:
        """Return a copy in which ``changes`` replaces sources by file name. A source of None removes the file."""
        sources = {**self.sources, **changes}
        return Companions({name: sources[name] for name in sorted(sources) if sources[name] is not None})  # type: ignore[misc]


def list_companions(directory: Path) -> Companions:
    """List the files of a checkpoint or adapter that a merge may copy.

    Raises:
        InvalidInput: The directory cannot be listed, or a file is a pipe, a device or a link that leaves the directory.
    """
    with parsing_errors(str(directory), "not a directory that can be listed"):
        all_names = [*os.listdir(directory), *nested_names(directory)]  # noqa: PTH208
    names = sorted(name for name in all_names if is_copyable(name))
    check_entries(directory, names)
    return Companions({name: directory for name in names if (directory / name).is_file()})


def list_uncopied(directory: Path, names: Collection[str] | None = None) -> tuple[str, ...]:
    """List the files and folders that users may expect in a merge, but that mergegate does not copy.

    ``names`` lists all files of the repository. Default: the files in ``directory``.
    """
    if names is None:
        with os.scandir(directory) as entries:
            top = {f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries}
    else:
        top = {name.partition("/")[0] + ("/" if "/" in name else "") for name in names}
    uncopied = (name for name in top if companion_kind(name) is not None and not is_copyable(name))
    return tuple(sorted(name for name in uncopied if not (name.endswith("/") and _has_companions(name[:-1]))))


def _has_companions(folder: str) -> bool:
    """Return whether a merge may copy files from a folder with this name."""
    return any(is_copyable(f"{folder}/x{suffix}") for suffix in (".json", ".jinja"))
