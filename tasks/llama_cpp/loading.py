"""Load a GGUF variant together with the tokenizer and the configuration of the model that was quantized.

The result is a ``LoadedModel``, so code that tokenizes, divides and truncates text treats it like a transformers model.
Its ``network`` is a ``GgufNetwork``, which computes in llama.cpp. The process stays open for the next call, because the
parts of an evaluation are many and short.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeGuard

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import LoadedModel, Model, QuantizedModel, import_lean, on_unload, unload_models
from mergegate.tasks.llama_cpp.client import LlamaCpp, open_gguf, runtime_versions

BACKEND_NAME = "llama_cpp"


@dataclass(frozen=True)
class GgufNetwork:
    """A network that llama.cpp computes, with the parts of a transformers network that describe it."""

    gguf: LlamaCpp  # The open file.
    config: Any  # Configuration of the model that was quantized.
    generation_config: Any  # Its settings for generated answers, such as the tokens that end them.

    @property
    def device(self) -> Any:
        """Device of the tensors that callers create."""
        import torch

        return torch.device("cpu")

    def get_input_embeddings(self) -> Any:
        """Return an object with the number of token ids, ``num_embeddings``."""
        return SimpleNamespace(num_embeddings=self.gguf.vocabulary.vocabulary_size)


def runs_in_llama_cpp(model: Model) -> TypeGuard[QuantizedModel]:
    """Return whether llama.cpp evaluates ``model``."""
    return isinstance(model, QuantizedModel) and model.backend == BACKEND_NAME


_lock = threading.RLock()
_open: tuple[object, LoadedModel, ExitStack] | None = None  # the open file: key, model, and the way to close it


@contextmanager
def load_gguf(model: QuantizedModel) -> Iterator[LoadedModel]:
    """Provide a GGUF variant, to one thread at a time. Its process ends when another model is loaded.

    Raises:
        InvalidInput: See ``open_gguf``; also if the tokenizer cannot be loaded, or the environment with llama.cpp has
            changed since the variant was described.
    """
    global _open
    with _lock:
        location = f"{model.name} ({model.directory / model.weights})"
        installed = runtime_versions(model.python)
        if dict(model.runtime) != installed:
            raise InvalidInput(
                location,
                found=f"llama.cpp with {_describe(installed)}",
                expected=_describe(dict(model.runtime)) or "the versions of llama.cpp in the description of the model",
                remedy="the environment changed during the run: run again",
            )
        key = (model.digest, model.weights, model.python, model.tokenizer_directory)
        if _open is None or _open[0] != key or not _open[1].network.gguf.is_alive:
            close_gguf()
            unload_models()  # the models of both processes may not fit into memory together
            tokenizer, config, generation_config = _read_description(model, location)
            with ExitStack() as stack:
                gguf = stack.enter_context(open_gguf(model.directory / model.weights, model.python))
                _open = (
                    key,
                    LoadedModel(GgufNetwork(gguf, config, generation_config), tokenizer),
                    stack.pop_all(),
                )
        yield _open[1]


def close_gguf() -> None:
    """End the process of the open file, if there is one."""
    global _open
    with _lock:
        if _open is not None:
            _open[2].close()
            _open = None


on_unload(close_gguf)


def _describe(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(versions.items()))


def _read_description(model: QuantizedModel, location: str) -> tuple[Any, Any, Any]:
    """Return the tokenizer, the configuration and the generation settings of the model that was quantized."""
    import_lean("transformers")
    import transformers

    directory = model.tokenizer_directory
    options: dict[str, Any] = {"local_files_only": True}
    try:
        trust = {"trust_remote_code": model.source.runs_code}
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options, **trust)
        config = transformers.AutoConfig.from_pretrained(directory, **options, **trust)
        if (directory / "generation_config.json").is_file():
            generation_config = transformers.GenerationConfig.from_pretrained(directory, **options)
        else:
            generation_config = transformers.GenerationConfig.from_model_config(config)
    except Exception as error:  # a damaged file makes transformers and tokenizers raise many types
        raise InvalidInput(
            location,
            found=f"transformers cannot load the tokenizer in {directory}: {' '.join(str(error).split())[:300]}",
            expected="the tokenizer and configuration of the model that was quantized",
        ) from error
    return tokenizer, config, generation_config
