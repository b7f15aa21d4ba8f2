"""Checkpoints in memory, ready to be asked: loaded offline, without foreign code, and never half initialised.

The stages that run a model are many and short (one a task), loading is long: models stay in memory, those asked last
longest, as long as all of them fit into half of it; the other half is for what a batch takes. ``unload`` lets go of
all::

    with load_model(model, dtype="auto", device="cpu") as loaded:
        loaded.network(...)
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.system import system_memory
from mergegate.tasks.checkpoints.lean_imports import import_lean
from mergegate.tasks.checkpoints.memory import gpu_memory
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.store import digest

SMALLER = "a smaller batch_size or max_length, or dtype: bfloat16"  # the remedy where memory does not suffice

_SHARE = 0.5  # of the memory that there would be without any model
_SMALL = 10_000_000  # parameters; below, a layer is computed faster than threads agree that it is done


class OutOfModelMemory(InvalidInput):
    """Memory did not suffice for a model and a batch."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode on its device, with its tokenizer (both of transformers)."""

    network: Any
    tokenizer: Any

    @property
    def prefix(self) -> int | None:
        """Token that stands before every text: begin of text, or end of text where there is none, or nothing."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        token = bos if bos is not None else eos
        return None if token is None else int(token)

    @property
    def context(self) -> int | None:
        """Positions that the model was made for, where its configuration says."""
        config = self.network.config.get_text_config()
        limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "n_ctx"))
        return next((int(limit) for limit in limits if limit), None)

    @property
    def is_small(self) -> bool:
        """Whether several threads would wait for each other for longer than they compute: on a machine where others
        are at work too, two of them take ten times as long as one."""
        return sum(int(tensor.numel()) for tensor in self.network.parameters()) < _SMALL


_Asked = tuple[str, str, str]  # digest, dtype, device

_lock = threading.RLock()
_loaded: dict[_Asked, LoadedModel] = {}  # those asked last at the end
_most: int | None = None  # that may be held at once; None: as many as fit
_other_holders: list[Callable[[], None]] = []


def on_unload(unload_there: Callable[[], None]) -> None:
    """Have ``unload_there`` called before a model is loaded here: whoever holds one in a process of its own lets
    it go, because two models need not fit side by side."""
    _other_holders.append(unload_there)


@contextmanager
def torch_threads(loaded: LoadedModel, threads: int | None = None) -> Iterator[None]:
    """Inside, this thread asks ``loaded`` with so many threads of torch; None: as many as torch has. A small network
    with one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if loaded.is_small else threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def load_model(model: Model, *, dtype: str, device: str) -> Iterator[LoadedModel]:
    """The model in memory, for one user at a time.

    Args:
        dtype: ``auto`` for that of the checkpoint, or the name of a torch dtype.
        device: ``cpu`` or ``cuda``.

    Raises:
        OutOfModelMemory: when memory does not suffice; then no model is held any more.
        InvalidInput: when the directory holds no model that can be loaded as it is.
    """
    with _lock:
        wanted = (model.digest, dtype, device)
        if wanted not in _loaded:
            make_room(_size_of(model, dtype), device)  # first: they need not fit side by side
            for unload_there in _other_holders:
                unload_there()
            _loaded[wanted] = _load(model, dtype, device)
        _loaded[wanted] = loaded = _loaded.pop(wanted)
        try:
            with torch_threads(loaded):
                yield loaded
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            del loaded
            unload_models()
            raise OutOfModelMemory(
                f"{model.name} ({model.directory})",
                found=f"out of memory on {device}",
                remedy=SMALLER,
            ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Of the GPU, of Python, or of torch's on a CPU, which has no type of its own for it."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def load_private_model(model: Model, *, dtype: str, device: str) -> LoadedModel:
    """A model that the caller holds by himself, and changes.

    Nothing else is held when it is loaded, and when another is loaded here he is to let go of it (``on_unload``).

    Raises: as ``load_model``.
    """
    with _lock:
        unload_models()
        for unload_there in _other_holders:
            unload_there()
        return _load(model, dtype, device)


def make_room(size: int, device: str) -> None:
    """Let go of the models that were not asked for longest, until one of ``size`` bytes may stand beside the others."""
    with _lock:
        held = {asked: _bytes_of(loaded) for asked, loaded in _loaded.items()}
        before = len(held)
        memory = gpu_memory(device) if device.startswith("cuda") else system_memory()
        capacity = memory.available + _held_on(device, held) if memory else 0
        for asked in tuple(_loaded):
            if (_most is None or len(_loaded) < _most) and _held_on(device, held) + size <= _SHARE * capacity:
                break
            del _loaded[asked], held[asked]
        if len(held) < before:
            _give_back()


def hold_at_most(models: int | None) -> None:
    """Never hold more than so many at once, wherever they might fit; None: as many as fit."""
    global _most
    _most = models


def unload_models() -> None:
    """Forget the models that are held, and give their memory back."""
    with _lock:
        if _loaded:
            _loaded.clear()
            _give_back()


def _give_back() -> None:
    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _held_on(device: str, held: Mapping[_Asked, int]) -> int:
    return sum(size for (_, _, where), size in held.items() if where == device)


def _bytes_of(loaded: LoadedModel) -> int:
    return sum(int(tensor.nbytes) for tensor in (*loaded.network.parameters(), *loaded.network.buffers()))


def _size_of(model: Model, dtype: str) -> int:
    """Bytes that it will take at most: files of two bytes a parameter are taken for what may be float32 in memory."""
    stored = sum(file.stat().st_size for file in model.directory.glob("*.safetensors"))
    return 2 * stored if dtype == "float32" else stored


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over what decides how a tokenizer cuts text; equal for two copies of one tokenizer, however stored."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return digest({"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()})
    # Padding and truncation are how it was last called, not how it cuts.
    state = {name: part for name, part in json.loads(backend.to_str()).items() if name not in ("padding", "truncation")}
    return digest({"tokenizer": state, "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id})


def _load(model: Model, dtype: str, device: str) -> LoadedModel:
    where = f"{model.name} ({model.directory})"
    import_lean("accelerate", "transformers.modeling_utils")
    import transformers

    # mypy: transformers declares no return types here.
    loading_info: Any
    network: Any
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    loader: Any = transformers.AutoModelForCausalLM
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            model.directory, local_files_only=True, trust_remote_code=model.runs_code
        )
        network, loading_info = loader.from_pretrained(
            model.directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=model.runs_code,
            use_safetensors=True,
            output_loading_info=True,
        )
        network = network.to(device).eval()
    except Exception as error:
        if _is_out_of_memory(error):
            raise OutOfModelMemory(
                where, found=f"does not fit into the memory of {device}", remedy="dtype: bfloat16, or more memory"
            ) from error
        # Whatever a file of the checkpoint makes transformers, tokenizers or safetensors raise: their types are many.
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(
            where,
            found=f"cannot be loaded: {cause[:300]}",
            expected="a causal language model of transformers in safetensors, with its tokenizer",
        ) from error
    # transformers fills what is missing with random numbers and goes on.
    bad = sorted(loading_info["missing_keys"]) + sorted(str(key) for key in loading_info["mismatched_keys"])
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise InvalidInput(where, found=f"no tensor that fits {bad[0]}{more}", expected="a complete checkpoint")
    return LoadedModel(network, tokenizer)
