"""Reading a ``pytorch_model.bin`` without running it: where its tensors lie, from the few opcodes that say so.

The format (torch.save since 1.6) is an uncompressed zip: ``<root>/data.pkl`` describes tensors over storages, the bytes
of storage ``k`` are ``<root>/data/k``. A pickle is a program; here nothing of it is executed. The opcodes that a
dictionary of tensors needs are interpreted into plain values, and the few functions it may name are never looked up:
they stand for "a tensor over this storage". Anything else is refused, as is whatever does not lie inside the file.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merge_core.checkpoint.dtypes import BY_TORCH_NAME, DType
from merge_core.checkpoint.safetensors_file import StoredTensor
from merge_core.errors import InvalidInput

# A description takes about 200 bytes per tensor; this bounds what a hostile file makes us allocate.
MAX_PICKLE_BYTES = 100_000_000
_MAX_DIMENSIONS = 64
_UNSAFE = "do not load it: a pickle can run any program; ask for the model as safetensors"
_DAMAGED = "download or copy the file again"
_RESAVE = "load it with torch.load(..., weights_only=True) and save it as safetensors"

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_TENSOR, _PARAMETER, _DICT = (
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "collections OrderedDict",
)


@dataclass(frozen=True)
class _Global:
    """A name that the pickle would import; here only a name."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """A run of elements in the zip member ``data/<key>``."""

    dtype: DType
    key: str
    numel: int


@dataclass(frozen=True)
class _View:
    """A tensor over a storage; offset and strides count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


class _Mark:
    """Start of a run of items on the stack."""


def read_pickled(path: Path) -> tuple[StoredTensor, ...]:
    """Tensors of the file at ``path`` in the order of their bytes; their bytes are not read. Tensors may share bytes.

    Raises:
        InvalidInput: Not a zip of torch.save, damaged, with anything else than a dictionary of contiguous tensors in
            it, or with tensors that leave their storage.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path)
            root = next((name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")), None)
            if root is None:
                raise InvalidInput(str(path), found="a zip without data.pkl", expected="a file of torch.save")
            if f"{root}byteorder" in members and archive.read(members[f"{root}byteorder"]).strip() != b"little":
                raise InvalidInput(str(path), found="big-endian numbers", expected="little-endian", remedy=_RESAVE)
            if members[f"{root}data.pkl"].file_size > MAX_PICKLE_BYTES:
                raise InvalidInput(str(path), found="a description of over 100 MB", expected="tensors")
            text = archive.read(members[f"{root}data.pkl"])
            views = _views(text, path)
            starts = _starts(archive, [members.get(f"{root}data/{view.storage.key}") for view in views.values()], path)
    except FileNotFoundError:
        raise InvalidInput(str(path), found="no such file", expected="a file of torch.save") from None
    except OSError as error:
        raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise InvalidInput(
            str(path),
            found=f"not a zip that can be read ({error})",
            expected="a file of torch.save (PyTorch 1.6 or newer)",
            remedy=f"an older file: {_RESAVE}; otherwise {_DAMAGED}",
        ) from None
    tensors = [_located(name, view, *start, path) for (name, view), start in zip(views.items(), starts, strict=True)]
    return tuple(sorted(tensors, key=lambda tensor: tensor.offset))


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.filename in members:
            raise InvalidInput(f"{path}: {info.filename}", found="there twice", remedy=_DAMAGED)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise InvalidInput(f"{path}: {info.filename}", found="compressed or encrypted", expected="plain bytes")
        members[info.filename] = info
    return members


def _starts(archive: zipfile.ZipFile, infos: list[zipfile.ZipInfo | None], path: Path) -> list[tuple[int, int]]:
    """First byte and size of the members' data: the local header, whose length varies, comes before it."""
    file: Any = archive.fp
    size = os.fstat(file.fileno()).st_size
    found = []
    for info in infos:
        if info is None:
            raise InvalidInput(str(path), found="a tensor without its bytes", remedy=_DAMAGED)
        file.seek(info.header_offset)
        header = file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise InvalidInput(f"{path}: {info.filename}", found="no header where it should begin", remedy=_DAMAGED)
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        if start + info.file_size > size:
            raise InvalidInput(f"{path}: {info.filename}", found="reaches beyond the file", remedy=_DAMAGED)
        found.append((start, info.file_size))
    return found


def _located(name: str, view: _View, start: int, size: int, path: Path) -> StoredTensor:
    dtype = view.storage.dtype
    tensor = StoredTensor(name, path, dtype, view.shape, start + view.offset * dtype.size)
    if not view.contiguous:
        raise InvalidInput(
            f"{path}: {name}",
            found=f"shape {list(view.shape)} with strides {list(view.strides)}",
            expected="elements in their order",
            remedy=_RESAVE,
        )
    if (view.offset * dtype.size + tensor.nbytes) > min(size, view.storage.numel * dtype.size):
        raise InvalidInput(f"{path}: {name}", found="reaches beyond its storage", remedy=_DAMAGED)
    return tensor


def _views(text: bytes, path: Path) -> dict[str, _View]:
    """The dictionary of tensors that the pickle describes."""
    try:
        value = _interpret(text, path)
    except (ValueError, IndexError, TypeError, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise InvalidInput(f"{path}: data.pkl", found=f"damaged: {error!r:.100}", remedy=_DAMAGED) from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{path}: data.pkl", found="no dictionary", expected="tensors by name", remedy=_RESAVE)
    for name, view in value.items():
        if not isinstance(view, _View):
            kind = "a dictionary" if isinstance(view, dict) else f"a {type(view).__name__}"
            raise InvalidInput(
                f"{path}: {name!r:.60}",
                found=kind,
                expected="a tensor: a checkpoint of weights, not of a training run",
                remedy=_RESAVE,
            )
    return value


def _interpret(text: bytes, path: Path) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, position in pickletools.genops(text):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                stack.append(_Mark())
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                items = tuple(stack[-count:])
                del stack[-count:]
                stack.append(items)
            case "TUPLE":
                stack.append(tuple(_above_mark(stack)))
            case "APPEND":
                item = stack.pop()
                _append(stack[-1], [item], path)
            case "APPENDS":
                items = tuple(_above_mark(stack))
                _append(stack[-1], items, path)
            case "SETITEM":
                item = stack.pop()
                _set(stack[-2], [stack.pop(), item], path)
            case "SETITEMS":
                items = tuple(_above_mark(stack))
                _set(stack[-1], list(items), path)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_named(argument, path))
            case "BINPERSID":
                stack.append(_storage(stack.pop(), path))
            case "REDUCE":
                items = stack.pop()
                stack.append(_called(stack.pop(), items, path))
            case "BUILD":
                state = stack.pop()  # Attributes of a dictionary (versions of its modules): not weights.
                if not isinstance(stack[-1], dict) or not isinstance(state, dict):
                    raise _refusal("sets the state of an object", path)
            case name:
                raise _refusal(f"the instruction {name} at byte {position}", path)
    raise ValueError("no end")


def _above_mark(stack: list[Any]) -> Iterator[Any]:
    at = max(index for index, item in enumerate(stack) if isinstance(item, _Mark))
    items = stack[at + 1 :]
    del stack[at:]
    return iter(items)


def _append(target: Any, items: Sequence[Any], path: Path) -> None:
    if not isinstance(target, list):
        raise _refusal("appends to an object", path)
    target.extend(items)


def _set(target: Any, items: list[Any], path: Path) -> None:
    if not isinstance(target, dict):
        raise _refusal("sets items of an object", path)
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is not str:  # Others may nest so deeply that hashing them overflows the stack.
            raise ValueError("a key that is no text")
        if isinstance(value, _View) and key in target:
            raise InvalidInput(f"{path}: {key!r:.60}", found="named twice", remedy=_DAMAGED)
        target[key] = value


def _named(name: str, path: Path) -> _Global:
    module, _, attribute = name.partition(" ")
    if name not in (_TENSOR, _PARAMETER, _DICT) and not (module == "torch" and attribute in _STORAGES):
        raise _refusal(f"code: {module}.{attribute}", path)
    return _Global(name)


def _storage(saved: Any, path: Path) -> _Storage:
    kind, storage, key, _, numel = saved
    if kind != "storage" or not isinstance(storage, _Global) or not storage.name.startswith("torch "):
        raise _refusal("a reference to something that is no storage", path)
    if type(key) is not str or type(numel) is not int or numel < 0:
        raise ValueError("storage")
    return _Storage(BY_TORCH_NAME[_STORAGES[storage.name.removeprefix("torch ")]], key, numel)


def _called(function: Any, arguments: Any, path: Path) -> Any:
    name = function.name if isinstance(function, _Global) else None
    if name == _DICT and arguments == ():
        return {}
    if name == _PARAMETER and isinstance(arguments, tuple) and isinstance(arguments[0], _View):
        return arguments[0]
    if name == _TENSOR:
        storage, offset, shape, strides = arguments[:4]
        whole = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError("tensor")
        if not all(type(number) is int and 0 <= number < 2**63 for number in whole):
            raise ValueError("numbers of a tensor")
        return _View(storage, offset, tuple(shape), tuple(strides))
    raise _refusal("a call of something that is no tensor", path)


def _refusal(found: str, path: Path) -> InvalidInput:
    return InvalidInput(f"{path}: data.pkl", found=found, expected="nothing but tensors", remedy=_UNSAFE)
