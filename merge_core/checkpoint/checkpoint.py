"""Open a checkpoint on disk as a config and a table that states the file, format, shape and offset of each tensor.

All files are untrusted input: an index cannot point outside the directory, and index and shards must agree.

``tie_word_embeddings`` in config.json is not reliable: a checkpoint may contain a trained head although the flag is
true, and transformers then loads that head. Therefore, mergegate treats a stored head as tied to the embedding if it
equals it, and as independent if it differs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from mergegate.merge_core.checkpoint.chat_template import DEFAULT, ChatTemplates, read_chat_templates
from mergegate.merge_core.checkpoint.companions import (
    MODULES_FILE,
    Companions,
    companion_kind,
    list_companions,
    list_uncopied,
)
from mergegate.merge_core.checkpoint.configuration import config_parts, read_config
from mergegate.merge_core.checkpoint.pickled_file import read_pickled
from mergegate.merge_core.checkpoint.quantized_tensors import decode_quantized
from mergegate.merge_core.checkpoint.safetensors_file import read_header, read_into
from mergegate.merge_core.checkpoint.tensors import AnyTensor, StoredTensor
from mergegate.merge_core.errors import Finding, InvalidInput, to_printable
from mergegate.merge_core.parsing import JsonBounds, open_plain, parse_json, read_json

# The index of a mixture of 384 experts in 61 layers lists 70,000 tensors in 8 MB.
_INDEX_BOUNDS = JsonBounds(size=64 << 20)

# Name parts that wrappers around a model or its parts add, with the wrapper and the expression for the bare model.
_WRAPPERS = {
    "_orig_mod": ("torch.compile", "model._orig_mod"),
    "_fsdp_wrapped_module": ("FSDP", "accelerator.unwrap_model(model)"),
    "_checkpoint_wrapped_module": ("activation checkpointing", "accelerator.unwrap_model(model)"),
}
# Prefixes that a network may also use itself. They point to a wrapper only if all tensor names start with them.
_OUTER_WRAPPERS = {
    "module": ("DistributedDataParallel or DeepSpeed", "model.module"),
    "base_model.model": ("PEFT", "model.merge_and_unload()"),
}

# Suffixes of names, after a dot. A plan tests every tensor, and a suffix test takes a tenth of the time of a regex.
_HEADS = (".lm_head.weight", ".embed_out.weight")
_EMBEDDINGS = (
    *(f".{word}.weight" for word in ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")),
    *(f".{word}.embeddings.weight" for word in ("backbone", "model")),
)
_FLAG = "tie_word_embeddings"
_BLOCK_BYTES = 4 << 20

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"
PICKLED_SINGLE_NAME = "pytorch_model.bin"


def class_of(config: Mapping[str, Any]) -> str:
    """Return the first entry of ``architectures`` in ``config``, or an empty string."""
    architectures = config.get("architectures")
    return str(architectures[0] or "") if isinstance(architectures, list) and architectures else ""


@dataclass(frozen=True)
class Checkpoint:
    """A model in Hugging Face layout.

    Args:
        directory: Directory that contains ``config.json`` and the weights.
        config: Content of ``config.json``, adjusted to ``tensors`` (tied head, decoded quantized weights).
        tensors: Tensors by name, in the order of the files and of the bytes in each file.
        companions: Tokenizer, generation settings, chat templates, processors and custom code. These files may be
            outside ``directory``.
        chat_templates: Chat templates by name.
        uncopied: Files and folders (with a trailing ``/``) of ``directory`` that users may expect in a merge, but that
            mergegate does not copy.
        findings: Problems found in the files, with locations relative to the checkpoint (``config.json: …``).
        module_tensors: Tensors of sentence-transformers modules that a merge will write, by folder and name
            (``2_Dense/linear.weight``). Empty for a checkpoint on disk, whose module weights are ``companions``.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, AnyTensor]
    companions: Companions = field(default_factory=Companions)
    chat_templates: ChatTemplates = field(default_factory=dict)
    uncopied: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    module_tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def chat_template(self) -> str | None:
        """Default chat template, or None if the model has none."""
        return self.chat_templates.get(DEFAULT)

    def stored_tensors(self) -> Iterator[StoredTensor]:
        """Yield every stored tensor that belongs to the checkpoint, including the inputs of derived tensors."""
        for tensor in self.tensors.values():
            yield from tensor.parts

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def architecture(self) -> str:
        """Class name of the model. Without one, the config's ``model_type``, or an empty string if both are missing."""
        return self.class_name or str(self.config.get("model_type", ""))

    @property
    def class_name(self) -> str:
        """Class name of the model: the first entry of ``architectures`` in the config, or an empty string."""
        return class_of(self.config)


Headers: TypeAlias = Mapping[Path, Sequence[StoredTensor]]


def open_checkpoint(
    directory: Path, remote_headers: Headers | None = None, names: Collection[str] | None = None
) -> Checkpoint:
    """Read the config and the tensor headers of the checkpoint in ``directory``, but no weights.

    If a Hub repository is only partly downloaded, ``remote_headers`` supplies the headers of the missing weight files,
    by the path that each file will have, and ``names`` lists all files of the repository.

    Raises:
        InvalidInput: Config or weights are missing, files are damaged or contradict each other, an index or a link
            leaves the directory, or a file is a pipe or a device.
    """
    if not directory.is_dir():
        raise InvalidInput(str(directory), found="the directory does not exist", expected="a checkpoint directory")
    companions = list_companions(directory)
    if MODULES_FILE in companions:
        _require_network_in_root(directory, companions)
    config: Mapping[str, Any] = read_config(directory / "config.json")
    headers = remote_headers or {}
    index_name, single_name = INDEX_NAME, SINGLE_NAME
    # safetensors takes precedence over pickled files.
    pickled = sorted(directory.glob("pytorch_model*.bin"))
    if pickled and not headers and not any(directory.glob("*.safetensors")):
        index_name, single_name = PICKLED_INDEX_NAME, PICKLED_SINGLE_NAME
    index, single = directory / index_name, directory / single_name
    if index.exists():
        tensors = _read_indexed(directory, index, single, headers)
        if single.exists() and any(tensor.file != single for tensor in tensors.values()):
            raise InvalidInput(
                str(directory),
                found=f"both {single_name} and {index_name}, which does not list it",
                expected="only one of them, because the other one is left over from an earlier save",
                remedy=f"delete {single_name}, or {index_name} and its shards. If both exist, transformers loads"
                f" {single_name}",
            )
    elif single in headers or single.exists():
        tensors = _read_headers([single], directory, headers)
    else:
        beside = {*directory.glob("*.safetensors"), *headers}
        files = sorted(file for file in beside if companion_kind(file.name) != "language adapter") or pickled
        if not files:
            raise InvalidInput(
                str(directory), found="it contains no weights", expected="*.safetensors, or pytorch_model*.bin"
            )
        tensors = _read_headers(files, directory, headers)
    if not tensors:
        raise InvalidInput(str(directory), found="its files contain no tensors", expected="a checkpoint with weights")
    _require_bare_names(tensors)
    settled, config, head_findings = settle_head(tensors, config, directory, remote=headers)
    table, config, decoding = decode_quantized(settled, config)
    read = {tensor.file.name for tensor in tensors.values()}
    templates = read_chat_templates(companions)
    uncopied = tuple(name for name in list_uncopied(directory, names) if name not in read)
    return Checkpoint(directory, config, table, companions, templates, uncopied, (*head_findings, *decoding))


def _require_network_in_root(directory: Path, companions: Companions) -> None:
    """Raise InvalidInput if the first module of a sentence-transformers model is not a network in ``directory``.

    Older versions of the library save the network in a folder. A static embedding and a router have no configuration of
    a network.
    """
    modules = parse_json(companions.read(MODULES_FILE), companions.location(MODULES_FILE), bounds=JsonBounds())
    first = modules[0] if isinstance(modules, list) and modules else None
    folder, class_name = (first.get("path"), first.get("type")) if isinstance(first, dict) else (None, None)
    if isinstance(folder, str) and folder not in ("", "."):
        found = f"the first module is in {to_printable(folder)}/"
        remedy = "save the model again: SentenceTransformer(directory).save_pretrained(new_directory)"
    elif not (directory / "config.json").exists():
        name = to_printable(str(class_name).rpartition(".")[2])
        found = f"the first module is {name}, which has no config.json"
        remedy = "merge the networks in its folders as models of their own, and average tables of static embeddings"
    else:
        return
    raise InvalidInput(
        companions.location(MODULES_FILE),
        found=found,
        expected="a network whose config.json and weights are next to modules.json",
        remedy=remedy,
    )


def _read_headers(
    files: Iterable[Path], directory: Path, remote_headers: Headers, weight_map: Mapping[str, str] | None = None
) -> dict[str, StoredTensor]:
    """Return the tensors of several files by name.

    If several files contain a tensor, ``weight_map`` selects one of them. It maps tensor names to file names.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        if path in remote_headers:
            header = remote_headers[path]
        else:
            header = (read_pickled if path.suffix == ".bin" else read_header)(path, within=directory)
        for tensor in header:
            selected = weight_map.get(tensor.name) if weight_map else None
            if selected is not None and directory / selected != path:
                continue
            if tensor.name in tensors:
                raise InvalidInput(
                    tensor.full_name,
                    found=f"{tensors[tensor.name].file.name} also contains this tensor",
                    expected="each tensor in one shard",
                    remedy="download the checkpoint again",
                )
            tensors[tensor.name] = tensor
    return tensors


def _read_indexed(directory: Path, index: Path, single: Path, remote_headers: Headers) -> dict[str, StoredTensor]:
    weight_map = read_json(index, bounds=_INDEX_BOUNDS).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidInput(
            str(index), found="the key 'weight_map' is missing", expected="an object: tensor name → file name"
        )
    files: set[str] = set()
    for name, file in weight_map.items():
        if isinstance(file, str) and file in files:
            continue
        path = PurePosixPath(file) if isinstance(file, str) and "\0" not in file else PurePosixPath("/")
        if path.is_absolute() or ".." in path.parts or "\\" in str(file) or not path.parts:
            raise InvalidInput(
                f"{index}: {name}",
                found=f"{file!r}",
                expected="a file name inside the checkpoint",
                remedy="do not use this checkpoint, because its index points outside its directory",
            )
        files.add(file)
    for file in sorted(files):
        if directory / file in remote_headers or os.path.lexists(directory / file):
            continue
        has_single = single.exists() and single.name not in files
        raise InvalidInput(
            str(index),
            found=f"it lists {file}, which does not exist" + (f", but {single.name} does" if has_single else ""),
            expected="an index of the weight files in its directory",
            remedy=f"delete {index.name} if {single.name} contains the full model"
            if has_single
            else "download the missing files, or save the model again",
        )
    paths = [directory / file for file in dict.fromkeys(weight_map.values())]
    tensors = _read_headers(paths, directory, remote_headers, weight_map)
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        raise InvalidInput(
            f"{index}: {missing[0]}",
            found=f"not in {weight_map[missing[0]]}" + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            expected="every tensor of the index in the shard that the index lists",
            remedy="download the checkpoint again",
        )
    return tensors


def _require_bare_names(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise InvalidInput if tensor names contain the prefix of a wrapper, because transformers ignores such tensors."""
    wrapped = [
        (tensor, part, *_WRAPPERS[part])
        for name, tensor in tensors.items()
        for part in name.split(".")
        if part in _WRAPPERS
    ]
    wrapped += [
        (next(iter(tensors.values())), prefix, wrapper, inner)
        for prefix, (wrapper, inner) in _OUTER_WRAPPERS.items()
        if all(name.startswith(f"{prefix}.") for name in tensors)
    ]
    for tensor, part, wrapper, inner in wrapped:
        raise InvalidInput(
            tensor.full_name,
            found=f"{part!r} in its name, because the model was saved inside a wrapper of {wrapper}",
            expected="names that transformers can load",
            remedy=f"save the inner model with {inner}.save_pretrained(...)",
        )


def is_head(name: str) -> bool:
    """Return whether the tensor called ``name`` is the output projection onto the vocabulary."""
    return f".{name}".endswith(_HEADS)


def is_embedding(name: str) -> bool:
    """Return whether the tensor called ``name`` is the table of token embeddings."""
    return f".{name}".endswith(_EMBEDDINGS)


def ties_embeddings(config: Mapping[str, Any]) -> bool | None:
    """Return ``tie_word_embeddings`` of a config or of its text part, or None if neither sets it."""
    flags = (part.get(_FLAG) for part in config_parts(config))
    return next((flag for flag in flags if isinstance(flag, bool)), None)


def with_tie(config: Mapping[str, Any], value: bool) -> dict[str, Any]:
    """Return a copy of ``config`` in which ``tie_word_embeddings``, also that of the text part, is ``value``."""
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(changed)
    for part in parts:
        part[_FLAG] = value
    return changed


def settle_head(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], directory: Path, remote: Collection[Path] = ()
) -> tuple[Mapping[str, StoredTensor], Mapping[str, Any], tuple[Finding, ...]]:
    """Make a checkpoint's tensors and its ``tie_word_embeddings`` agree.

    A head that equals the embedding is dropped, and the flag becomes true. A head that differs stays, and the flag
    becomes false. Nothing changes if the flag is already false, if the checkpoint does not have exactly one head and
    one embedding, or if one of them is in a file of ``remote``, which is not on this machine. Weights are read only for
    this comparison, up to the first difference.

    Returns:
        The tensors, the config, and a finding if the flag contradicts the stored head.
    """
    flag = ties_embeddings(config)
    heads = [name for name in tensors if is_head(name)]
    if flag is False or len(heads) != 1:
        return tensors, config, ()
    head = tensors[heads[0]]
    others = [tensor for tensor in tensors.values() if tensor is not head]
    tables = [tensor for tensor in others if is_embedding(tensor.name)]
    if head.nbytes and any((head.file, head.offset) == (item.file, item.offset) for item in others if item.nbytes):
        equal = True  # Pickled files of tied models refer to one storage twice.
    elif len(tables) != 1 or {head.file, tables[0].file} & set(remote):
        return tensors, config, ()
    else:
        equal = equal_bytes(head, tables[0], directory)
    if equal:
        rest = {name: tensor for name, tensor in tensors.items() if tensor is not head}
        return rest, config if flag else with_tie(config, value=True), ()
    contradiction = Finding(
        "warn",
        f"config.json: {_FLAG}",
        found=f"true, but the stored {head.name} differs from {tables[0].name}",
        expected="false for a model with an output head of its own",
        remedy=f"nothing to do: the stored head is merged, and the result has {_FLAG}: false",
    )
    return tensors, with_tie(config, value=False), (contradiction,) if flag else ()


def equal_bytes(first: StoredTensor, second: StoredTensor, directory: Path | None = None) -> bool:
    """Return whether two stored tensors have the same format, shape and content. Their files are in ``directory``."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with open_plain(first.file, within=directory) as file_1, open_plain(second.file, within=directory) as file_2:
        for start in range(0, first.nbytes, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, first.nbytes - start)
            block_1, block_2 = bytearray(count), bytearray(count)
            read_into(file_1.fileno(), memoryview(block_1), first.offset + start, first.file)
            read_into(file_2.fileno(), memoryview(block_2), second.offset + start, second.file)
            if block_1 != block_2:
                return False
    return True
