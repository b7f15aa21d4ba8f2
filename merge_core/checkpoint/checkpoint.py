"""A checkpoint on disk as a table of tensors: its config, and for every tensor the file, format, shape and offset.

Only headers and JSON are read. Everything is treated as untrusted: an index cannot point outside the directory, and
index and shards must agree.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from mergegate.merge_core.checkpoint.chat_template import DEFAULT, ChatTemplates, read_chat_templates
from mergegate.merge_core.checkpoint.companions import Companions, list_companions, list_others
from mergegate.merge_core.checkpoint.configuration import read_config
from mergegate.merge_core.checkpoint.derived_tensors import AnyTensor
from mergegate.merge_core.checkpoint.heads import settle_head
from mergegate.merge_core.checkpoint.pickled_file import read_pickled
from mergegate.merge_core.checkpoint.quantized_tensors import decode_quantised
from mergegate.merge_core.checkpoint.safetensors_file import StoredTensor, read_header
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.parsing import JsonBounds, read_json

# That of a mixture of 384 experts in 61 layers has 70,000 tensors and 8 MB.
_INDEX_BOUNDS = JsonBounds(size=64 << 20)

# Parts of names that wrappers around a model, or around parts of it, add: who adds them, and the model itself.
_WRAPPERS = {
    "_orig_mod": ("torch.compile", "model._orig_mod"),
    "_fsdp_wrapped_module": ("FSDP", "accelerator.unwrap_model(model)"),
    "_checkpoint_wrapped_module": ("activation checkpointing", "accelerator.unwrap_model(model)"),
}
# The same of what may be a name in a network too, unless all tensors begin with it.
_OUTER_WRAPPERS = {
    "module": ("DistributedDataParallel or DeepSpeed", "model.module"),
    "base_model.model": ("PEFT", "model.merge_and_unload()"),
}

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"
PICKLED_SINGLE_NAME = "pytorch_model.bin"


@dataclass(frozen=True)
class Checkpoint:
    """A model in Hugging Face layout.

    Args:
        directory: Where it lies.
        config: Its ``config.json``.
        tensors: Name → place of its bytes, in the order of the files and of the bytes in them.
        companions: Files that travel with a model besides config and weights: tokenizer, generation settings, chat
            templates, processors, custom code. They need not be in ``directory``.
        chat_templates: Chat templates by name.
        others: Names of files and folders (``name/``) of ``directory`` that no merge carries, although a user may
            miss them.
        findings: Notes on its files, with locations relative to the checkpoint (``config.json: …``).
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, AnyTensor]
    companions: Companions = field(default_factory=Companions)
    chat_templates: ChatTemplates = field(default_factory=dict)
    others: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def chat_template(self) -> str | None:
        """The default chat template."""
        return self.chat_templates.get(DEFAULT)

    def stored(self) -> Iterator[StoredTensor]:
        """Everything that is read where the whole checkpoint is."""
        for tensor in self.tensors.values():
            yield from tensor.parts

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def architecture(self) -> str:
        """Class name, else the config's ``model_type``, else an empty text."""
        return self.class_name or str(self.config.get("model_type", ""))

    @property
    def class_name(self) -> str:
        """First of the config's ``architectures``; empty if it names none."""
        architectures = self.config.get("architectures")
        return str(architectures[0] or "") if isinstance(architectures, list) and architectures else ""


Headers: TypeAlias = Mapping[Path, Sequence[StoredTensor]]


def open_checkpoint(
    directory: Path, elsewhere: Headers | None = None, names: Collection[str] | None = None
) -> Checkpoint:
    """Read configs and headers of the checkpoint in ``directory``; no weights.

    Args:
        directory: Where it lies.
        elsewhere: Headers of weight files that are not there yet (of a Hub repository, read from afar), by the path
            that each file will have.
        names: Names of all files of a Hub repository, of which only some are in ``directory``. Default: those that are.

    Raises:
        InvalidInput: No config or weights, damaged or contradicting files, an index or a link that leaves the
            directory, a pipe or a device in the place of a file.
    """
    if not directory.is_dir():
        raise InvalidInput(str(directory), found="no such directory", expected="a checkpoint directory")
    companions = list_companions(directory)
    config: Mapping[str, Any] = read_config(directory / "config.json")
    known = elsewhere or {}
    index_name, single_name = _names_of_weights(directory, known)
    index, single = directory / index_name, directory / single_name
    if index.exists():
        tensors = _indexed(directory, index, single, known)
        if single.exists() and any(tensor.file != single for tensor in tensors.values()):
            raise InvalidInput(
                str(directory),
                found=f"both {single_name} and {index_name}, which does not name it",
                expected="one of them: the other is stale, left over from an earlier save",
                remedy=f"delete {single_name}, or {index_name} and its shards; transformers loads {single_name} if both"
                " exist",
            )
    elif single in known or single.exists():
        tensors = {tensor.name: tensor for tensor in _header(single, directory, known)}
    else:
        tensors = _unindexed(directory, known)
    if not tensors:
        raise InvalidInput(str(directory), found="no tensors", expected="a checkpoint with weights")
    _require_bare_names(tensors)
    settled, config, head_findings = settle_head(tensors, config, directory, remote=known)
    table, config, decoding = decode_quantised(settled, config)
    templates, others = read_chat_templates(companions), list_others(directory, names)
    return Checkpoint(directory, config, table, companions, templates, others, (*head_findings, *decoding))


def _names_of_weights(directory: Path, elsewhere: Headers) -> tuple[str, str]:
    """Names of index and single file: of safetensors where there are any, else of pickled weights."""
    pickled = any(directory.glob("pytorch_model*.bin"))
    if pickled and not elsewhere and not any(directory.glob("*.safetensors")):
        return PICKLED_INDEX_NAME, PICKLED_SINGLE_NAME
    return INDEX_NAME, SINGLE_NAME


def _header(path: Path, directory: Path, elsewhere: Headers) -> Sequence[StoredTensor]:
    if path in elsewhere:
        return elsewhere[path]
    read = read_pickled if path.suffix == ".bin" else read_header
    return read(path, within=directory)


def _indexed(directory: Path, index: Path, single: Path, elsewhere: Headers) -> dict[str, StoredTensor]:
    weight_map = read_json(index, bounds=_INDEX_BOUNDS).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidInput(str(index), found="no 'weight_map'", expected="tensor name → file name")
    inside: set[str] = set()
    for name, file in weight_map.items():
        if isinstance(file, str) and file in inside:
            continue
        path = PurePosixPath(file) if isinstance(file, str) and "\0" not in file else PurePosixPath("/")
        if path.is_absolute() or ".." in path.parts or "\\" in str(file) or not path.parts:
            raise InvalidInput(
                f"{index}: {name}",
                found=f"{file!r}",
                expected="a file name inside the checkpoint",
                remedy="do not use this checkpoint: its index reaches outside its directory",
            )
        inside.add(file)
    for file in sorted(inside):
        if directory / file in elsewhere or os.path.lexists(directory / file):
            continue
        alone = single.exists() and single.name not in inside
        raise InvalidInput(
            str(index),
            found=f"it names {file}, which does not exist" + (f", while {single.name} does" if alone else ""),
            expected="an index of the weight files in its directory",
            remedy=f"delete {index.name} if {single.name} is the whole model"
            if alone
            else "download the files that are missing, or save the model again",
        )
    tensors: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(weight_map.values()):
        for tensor in _header(directory / file, directory, elsewhere):
            named = weight_map.get(tensor.name, file)
            if named != file:
                continue  # The index says which of two copies counts.
            if tensor.name in tensors:
                raise _duplicate(tensor, tensors[tensor.name])
            tensors[tensor.name] = tensor
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise InvalidInput(
            f"{index}: {lost[0]}",
            found=f"not in {weight_map[lost[0]]}" + (f", and {len(lost) - 1} more" if len(lost) > 1 else ""),
            expected="every tensor of the index in the shard it names",
            remedy="download the checkpoint again",
        )
    return tensors


def _unindexed(directory: Path, elsewhere: Headers) -> dict[str, StoredTensor]:
    files = sorted({*directory.glob("*.safetensors"), *elsewhere}) or sorted(directory.glob("pytorch_model*.bin"))
    if not files:
        raise InvalidInput(str(directory), found="no weights", expected="*.safetensors, or pytorch_model*.bin")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _header(file, directory, elsewhere):
            if tensor.name in tensors:
                raise _duplicate(tensor, tensors[tensor.name])
            tensors[tensor.name] = tensor
    return tensors


def _require_bare_names(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise InvalidInput if the tensors are named as in a wrapper around the model: transformers ignores such names."""
    for name, tensor in tensors.items():
        words = name.split(".")
        for word, (wrapper, inner) in _WRAPPERS.items():
            if word in words:
                raise _wrapped(tensor, word, wrapper, inner)
    for prefix, (wrapper, inner) in _OUTER_WRAPPERS.items():
        if all(name.startswith(f"{prefix}.") for name in tensors):
            raise _wrapped(next(iter(tensors.values())), prefix, wrapper, inner)


def _wrapped(tensor: StoredTensor, words: str, wrapper: str, inner: str) -> InvalidInput:
    return InvalidInput(
        f"{tensor.file}: {tensor.name}",
        found=f"{words!r} in its name: the model was saved inside a wrapper of {wrapper}",
        expected="names that transformers can load",
        remedy=f"save the model itself: {inner}.save_pretrained(...)",
    )


def _duplicate(tensor: StoredTensor, other: StoredTensor) -> InvalidInput:
    return InvalidInput(
        f"{tensor.file}: {tensor.name}",
        found=f"also in {other.file.name}",
        expected="each tensor in one shard",
        remedy="download the checkpoint again",
    )
