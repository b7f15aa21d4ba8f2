"""A checkpoint in memory, ready to be asked: loaded offline, without foreign code, and never half initialised.

The stages that run a model are many and short (one a task), loading is long: the last model stays in memory until
another one is asked for, or until ``unload``::

    with load_model(model, dtype="auto", device="cpu") as loaded:
        loaded.network(...)
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from merge_core.errors import InvalidInput
from merge_core.store import digest
from tasks.checkpoints.model import Model

SMALLER = "a smaller batch_size or max_length, or dtype: bfloat16"  # the remedy where memory does not suffice


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


_lock = threading.RLock()
_loaded: tuple[tuple[str, str, str], LoadedModel] | None = None
_other_holders: list[Callable[[], None]] = []


def also_unload(unload_there: Callable[[], None]) -> None:
    """Have ``unload_there`` called before a model is loaded here: whoever holds one in a process of its own lets
    it go, because two models need not fit side by side."""
    _other_holders.append(unload_there)


@contextmanager
def load_model(model: Model, *, dtype: str, device: str) -> Iterator[LoadedModel]:
    """The model in memory, for one user at a time.

    Args:
        dtype: ``auto`` for that of the checkpoint, or the name of a torch dtype.
        device: ``cpu`` or ``cuda``.

    Raises:
        InvalidInput: when the directory holds no model that can be loaded as it is, or memory does not suffice.
    """
    global _loaded
    with _lock:
        wanted = (model.digest, dtype, device)
        if _loaded is None or _loaded[0] != wanted:
            unload()  # first: two models need not fit side by side
            for unload_there in _other_holders:
                unload_there()
            _loaded = (wanted, _load(model, dtype, device))
        import torch

        try:
            yield _loaded[1]
        except torch.OutOfMemoryError as error:
            unload()
            raise InvalidInput(
                f"{model.name} ({model.directory})",
                found=f"out of memory on {device}",
                remedy=SMALLER,
            ) from error


def unload() -> None:
    """Forget the model that is held, and give its memory back."""
    global _loaded
    with _lock:
        if _loaded is None:
            return
        _loaded = None
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


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
    import torch
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
            model.directory, local_files_only=True, trust_remote_code=False
        )
        network, loading_info = loader.from_pretrained(
            model.directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        network = network.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise InvalidInput(
            where, found=f"does not fit into the memory of {device}", remedy="dtype: bfloat16"
        ) from error
    except Exception as error:
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
