"""Locate the tensors of a ``pytorch_model.bin`` without executing its pickle.

The format (torch.save since 1.6) is an uncompressed zip. ``<root>/data.pkl`` describes tensors over storages, and
``<root>/data/k`` contains the bytes of storage ``k``. A pickle is a program, but this module imports and executes none
of it. It interprets only the few opcodes and function names that describe a dictionary of tensors. It refuses every
other opcode or function, and every tensor that reaches beyond the file.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mergegate.merge_core.checkpoint.tensors import BY_TORCH_NAME, DType, StoredTensor
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import check_zip_directory, open_plain, parsing_errors

# A description takes about 200 bytes and 40 instructions per tensor. These limits bound the memory and the time that a
# hostile file can cost.
MAX_PICKLE_BYTES = 32_000_000
MAX_INSTRUCTIONS = 2_000_000
_MAX_MEMBERS = 100_000
_MAX_DIMENSIONS = 64
_UNSAFE = "do not load the file, because a pickle can run any program. Ask its author for safetensors"
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
    """Name of a function that the pickle would import. mergegate never imports it."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """Consecutive elements in the zip member ``data/<key>``."""

    dtype: DType
    key: str
    numel: int


@dataclass(frozen=True)
class _View:
    """A tensor over a storage. Offset and strides count elements."""

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


_CONSTANTS = {"EMPTY_TUPLE": (), "NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"))


def read_pickled(path: Path, *, within: Path | None = None) -> tuple[StoredTensor, ...]:
    """Return the tensors of a file in the order of their bytes, without reading the bytes. Tensors may share bytes.

    If ``within`` is set, that directory must contain the file after all links are resolved.

    Raises:
        InvalidInput: The file is missing, damaged or not a zip of torch.save, it contains anything but a dictionary of
            contiguous tensors, or a tensor reaches beyond its storage.
    """
    try:
        with open_plain(path, within=within) as file:
            return parse_pickled(file, os.fstat(file.fileno()).st_size, path)
    except FileNotFoundError:
        raise InvalidInput(str(path), found="the file does not exist", expected="a file of torch.save") from None


def parse_pickled(file: BinaryIO, size: int, path: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors of the open ``file`` of ``size`` bytes like :func:`read_pickled`. Messages name ``path``."""
    remedy = f"if an older PyTorch wrote it, {_RESAVE}. Otherwise, {_DAMAGED}"
    with parsing_errors(
        str(path), "not a readable zip file", expected="a file of torch.save (PyTorch 1.6 or newer)", remedy=remedy
    ):
        check_zip_directory(file, size, path, most=_MAX_MEMBERS, remedy=_RESAVE)
        with zipfile.ZipFile(file) as archive:
            members = _members(archive, path)
            root = next((name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")), None)
            if root is None:
                raise InvalidInput(str(path), found="the zip has no data.pkl", expected="a file of torch.save")
            order = members.get(f"{root}byteorder")
            if order is not None and (order.file_size > 64 or archive.read(order).strip() != b"little"):
                raise InvalidInput(str(path), found="big-endian numbers", expected="little-endian", remedy=_RESAVE)
            if members[f"{root}data.pkl"].file_size > MAX_PICKLE_BYTES:
                raise InvalidInput(str(path), found="data.pkl has more than 32 MB", expected="a description of tensors")
            views = _views(archive.read(members[f"{root}data.pkl"]), path)
            keys = dict.fromkeys(view.storage.key for view in views.values())
            starts = {}  # First byte and size of each member's data, which follows a local header of variable length.
            for key in keys:
                if (info := members.get(f"{root}data/{key}")) is None:
                    raise InvalidInput(str(path), found="the bytes of a tensor are missing", remedy=_DAMAGED)
                location = f"{path}: {info.filename}"
                file.seek(info.header_offset)
                header = file.read(30)
                if len(header) < 30 or header[:4] != b"PK\x03\x04":
                    raise InvalidInput(location, found="its local header is missing", remedy=_DAMAGED)
                start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
                if start + info.file_size > size:
                    raise InvalidInput(location, found="it extends beyond the end of the file", remedy=_DAMAGED)
                starts[key] = (start, info.file_size)
    tensors = []
    for name, view in views.items():
        (start, length), dtype = starts[view.storage.key], view.storage.dtype
        tensor = StoredTensor(name, path, dtype, view.shape, start + view.offset * dtype.size)
        if not view.contiguous:
            raise InvalidInput(
                tensor.full_name,
                found=f"shape {list(view.shape)} with strides {list(view.strides)}",
                expected="contiguous elements",
                remedy=_RESAVE,
            )
        if view.offset * dtype.size + tensor.nbytes > min(length, view.storage.numel * dtype.size):
            raise InvalidInput(tensor.full_name, found="the tensor extends beyond its storage", remedy=_DAMAGED)
        tensors.append(tensor)
    return tuple(sorted(tensors, key=lambda tensor: tensor.offset))


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    offsets: set[int] = set()
    for info in archive.infolist():
        if info.filename in members:
            raise InvalidInput(f"{path}: {info.filename}", found="the zip contains the name twice", remedy=_DAMAGED)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise InvalidInput(
                f"{path}: {info.filename}", found="the member is compressed or encrypted", expected="a stored member"
            )
        if info.header_offset in offsets:
            raise InvalidInput(
                f"{path}: {info.filename}", found="it starts at the same byte as another member", remedy=_DAMAGED
            )
        offsets.add(info.header_offset)
        members[info.filename] = info
    return members


def _views(text: bytes, path: Path) -> dict[str, _View]:
    with parsing_errors(f"{path}: data.pkl", "damaged", remedy=_DAMAGED):
        value = _Machine(path).run(text)
    if not isinstance(value, dict):
        raise InvalidInput(
            f"{path}: data.pkl", found="it does not contain a dictionary", expected="tensors by name", remedy=_RESAVE
        )
    for name, view in value.items():
        if not isinstance(view, _View):
            kind = "a dictionary" if isinstance(view, dict) else f"a {type(view).__name__}"
            raise InvalidInput(
                f"{path}: {name!r:.60}",
                found=kind,
                expected="a tensor, as in a checkpoint of weights (not of a training run)",
                remedy=_RESAVE,
            )
    return value


class _Machine:
    """Interpreter of the few pickle instructions that describe tensors, at constant cost per instruction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[int] = []  # Heights of the stack at marks.
        self._memo: dict[int, Any] = {}

    def run(self, text: bytes) -> Any:
        argument: Any
        for number, (opcode, argument, position) in enumerate(pickletools.genops(text)):
            if number >= MAX_INSTRUCTIONS:
                raise InvalidInput(
                    f"{self._path}: data.pkl",
                    found=f"more than {MAX_INSTRUCTIONS} instructions",
                    expected="about 40 per tensor",
                    remedy=_RESAVE,
                )
            if opcode.name == "STOP":
                return self._pop()
            if opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _LITERALS:
                self._stack.append(argument)
            else:
                self._step(opcode.name, argument, position)
        raise ValueError("the STOP instruction is missing")

    def _step(self, name: str, argument: Any, position: int | None) -> None:
        stack, path = self._stack, self._path
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(reversed([self._pop() for _ in range(int(name[-1]))])))
            case "TUPLE":
                stack.append(tuple(self._above_mark()))
            case "APPEND" | "APPENDS":
                items = [self._pop()] if name == "APPEND" else self._above_mark()
                if not isinstance(self._top(), list):
                    raise _refusal("it appends to an object", path)
                self._top().extend(items)
            case "SETITEM" | "SETITEMS":
                items = [self._pop(), self._pop()][::-1] if name == "SETITEM" else self._above_mark()
                target = self._top()
                if not isinstance(target, dict):
                    raise _refusal("it sets items of an object", path)
                for key, value in zip(items[::2], items[1::2], strict=True):
                    if type(key) is not str:  # Other types may nest so deeply that hashing them overflows the stack.
                        raise ValueError("a key is not text")
                    key.encode()  # Fails for a lone surrogate.
                    if isinstance(value, _View) and key in target:
                        found = "the dictionary contains the name twice"
                        raise InvalidInput(f"{path}: {key!r:.60}", found=found, remedy=_DAMAGED)
                    target[key] = value
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self._top()
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._top()
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                module, _, attribute = argument.partition(" ")
                if argument not in (_TENSOR, _PARAMETER, _DICT) and not (module == "torch" and attribute in _STORAGES):
                    raise _refusal(f"code: {module}.{attribute}", path)
                stack.append(_Global(argument))
            case "BINPERSID":
                kind, storage, key, _, numel = self._pop()
                if kind != "storage" or not isinstance(storage, _Global) or not storage.name.startswith("torch "):
                    raise _refusal("a reference to an object that is not a storage", path)
                if type(key) is not str or type(numel) is not int or numel < 0:
                    raise ValueError("storage")
                dtype = BY_TORCH_NAME[_STORAGES[storage.name.removeprefix("torch ")]]
                stack.append(_Storage(dtype, key, numel))
            case "REDUCE":
                arguments, function = self._pop(), self._pop()
                stack.append(_evaluate_call(function, arguments, path))
            case "BUILD":
                state = self._pop()  # Attributes of a dictionary (versions of its modules), which are not weights.
                if not isinstance(self._top(), dict) or not isinstance(state, dict):
                    raise _refusal("it sets the state of an object", path)
            case _:
                raise _refusal(f"the instruction {name} at byte {position}", path)

    def _top(self) -> Any:
        self._check_height()
        return self._stack[-1]

    def _pop(self) -> Any:
        self._check_height()
        return self._stack.pop()

    def _check_height(self) -> None:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("the stack is empty")

    def _above_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("the mark is missing")
        height = self._marks.pop()
        items = self._stack[height:]
        del self._stack[height:]
        return items


def _evaluate_call(function: Any, arguments: Any, path: Path) -> Any:
    name = function.name if isinstance(function, _Global) else None
    if name == _DICT and arguments == ():
        return {}
    if not isinstance(arguments, tuple) or len(arguments) > 16:
        raise ValueError("arguments")
    if name == _PARAMETER and arguments and isinstance(arguments[0], _View):
        return arguments[0]
    if name == _TENSOR:
        storage, offset, shape, strides = arguments[:4]
        if type(shape) is not tuple or type(strides) is not tuple or not isinstance(storage, _Storage):
            raise ValueError("tensor")
        if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError("dimensions of a tensor")
        if not all(type(number) is int and 0 <= number < 2**63 for number in (offset, *shape, *strides)):
            raise ValueError("numbers of a tensor")
        return _View(storage, offset, tuple(shape), tuple(strides))
    raise _refusal("a call that does not build a tensor", path)


def _refusal(found: str, path: Path) -> InvalidInput:
    return InvalidInput(f"{path}: data.pkl", found=found, expected="only tensors", remedy=_UNSAFE)
