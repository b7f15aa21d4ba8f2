"""Load checkpoints into memory and keep them there for the next stage.

Loading needs no network and runs no code of the checkpoint unless the profile trusts it. A model with missing weights
is rejected. Stages that run a model are many and short (one per task), while loading takes long. Models therefore stay
loaded as long as all of them fit into half of the memory, and the least recently used model is dropped first. The other
half is reserved for batches. ``unload_models`` drops all models::

    with load_model(model, dtype="auto", device="cpu") as loaded:
        loaded.network(...)

Several libraries import an optional package if it is installed. ``requests`` imports a second encoding detector,
``portalocker`` (used by lm-eval's metrics) a Redis client, ``accelerate`` an AWS client, and the models of transformers
SciPy, for the losses of object detectors. Together these imports take a quarter of the time that the model process
needs before its first answer. Another eighth goes into garbage collection over half a million objects that are never
freed. ``import_lean`` avoids both.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind, is_of_tower, kind_of_directory
from mergegate.merge_core.checkpoint import MODULES_FILE
from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.parsing import JsonBounds, parse_json, read_json, read_plain
from mergegate.merge_core.system import Capacity, system_memory
from mergegate.tasks.base.store import digest
from mergegate.tasks.models.checkpoints.model import Model, QuantizedModel

SMALLER = "use a smaller batch_size or max_length, or dtype: bfloat16"  # Remedy if memory runs out.

_UNUSED_PACKAGES = ("boto3", "chardet", "redis", "scipy")
_SENTENCE_TRANSFORMERS = 6  # Oldest major version.
_WEIGHTS = ("*.safetensors", "[0-9]*_*/*.safetensors")  # Weights of the network and of its modules.
_SHARE = 0.5  # Share of the memory that models may use. The total is the memory available without any model.
_SMALL = 10_000_000  # Parameters. Below this, synchronizing threads takes longer than computing a layer.


def import_lean(*modules: str, exceptions: Collection[str] = ()) -> None:
    """Import ``modules`` in order, as if the unused optional packages were not installed, except ``exceptions``.

    If a package is already partly imported, it may have looked for the optional packages and stored the result. In that
    case, the rest of the package is imported as usual.
    """
    for module in modules:
        is_imported = module.partition(".")[0] in sys.modules
        unused = [name for name in _UNUSED_PACKAGES if name not in exceptions and name not in sys.modules]
        hidden = [] if is_imported else unused
        for name in hidden:
            # With None, both the import statement and find_spec report the package as missing.
            sys.modules[name] = None  # type: ignore[assignment]
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            importlib.import_module(module)
        finally:
            if was_enabled:
                gc.enable()
            for name in hidden:
                del sys.modules[name]


def gpu_memory(device: str) -> Capacity | None:
    """Return the total and free memory of ``cuda`` or ``cuda:N``, or None if the machine has no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device if ":" in device else torch.cuda.current_device())
    return Capacity(total, free)


class OutOfModelMemory(InvalidInput):
    """Error for memory that is too small for a model and a batch."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, with its tokenizer.

    Both are from transformers, or for embedding models and cross-encoders from sentence-transformers. ``processor``
    prepares pictures and sound, and is None if the model reads only text.
    """

    network: Any
    tokenizer: Any
    kind: ModelKind = TEXT_GENERATOR
    processor: Any = None

    @property
    def prefix(self) -> int | None:
        """ID of the token that precedes every text: begin of text or, if there is none, end of text. It may be None."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        token = bos if bos is not None else eos
        return None if token is None else int(token)

    @property
    def context(self) -> int | None:
        """Maximum number of positions that the configuration declares, or None."""
        config = self.network.config.get_text_config()
        limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "n_ctx"))
        return next((int(limit) for limit in limits if limit), None)

    @property
    def embeddings(self) -> int:
        """Number of token ids that the network can read."""
        return int(self.network.get_input_embeddings().num_embeddings)

    @property
    def is_small(self) -> bool:
        """Whether the network is so small that several threads would spend more time waiting than computing.

        On a busy machine, two threads take ten times as long as one.
        """
        return sum(int(tensor.numel()) for tensor in self.network.parameters()) < _SMALL


_CacheKey = tuple[str, str, str]  # Digest, dtype and device.

_lock = threading.RLock()
_loaded: dict[_CacheKey, LoadedModel] = {}  # The most recently used model is last.
_max_models: int | None = None  # Maximum number of models in memory. None: as many as fit.
_unload_callbacks: list[Callable[[], None]] = []


def on_unload(unload: Callable[[], None]) -> None:
    """Register ``unload`` to be called before this module loads a model.

    Code that holds a model in another process must register a function that drops it, because two models may not fit
    into memory at the same time.
    """
    _unload_callbacks.append(unload)


@contextmanager
def torch_threads(loaded_model: LoadedModel, threads: int | None = None) -> Iterator[None]:
    """Set the number of torch threads for running ``loaded_model`` inside the context.

    A small network gets one thread. Other networks get ``threads``, or by default the number that torch is set to.
    """
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(1 if loaded_model.is_small else threads or previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


@contextmanager
def load_model(model: Model, *, dtype: str, device: str) -> Iterator[LoadedModel]:
    """Provide the model in memory, to one thread at a time.

    ``dtype`` is ``auto`` for the dtype of the checkpoint, or the name of a torch dtype. ``device`` is ``cpu``, ``cuda``
    or ``cuda:N``.

    Raises:
        OutOfModelMemory: Memory is too small. If it ran out inside the context, all models have been dropped.
        InvalidInput: The directory does not contain a model that can be loaded.
    """
    with _lock:
        key = (model.digest, dtype, device)
        if key not in _loaded:
            make_room(model, dtype, device)  # Before loading, because both models may not fit together.
            for unload in _unload_callbacks:
                unload()
            _loaded[key] = _load(model, dtype, device)
        _loaded[key] = loaded = _loaded.pop(key)
        try:
            with torch_threads(loaded):
                yield loaded
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            del loaded
            unload_models()
            raise OutOfModelMemory(
                f"{model.name} ({model.directory})",
                found=f"the device {device} ran out of memory",
                remedy=SMALLER,
            ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether Python, the GPU or torch ran out of memory. On a CPU, torch has no exception type for this."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def load_private_model(model: Model, *, dtype: str, device: str) -> LoadedModel:
    """Return a model that the caller owns and may modify.

    This drops all other models first. The caller must register a function with ``on_unload`` that drops this model
    before another one is loaded. The arguments and errors are those of :func:`load_model`.
    """
    with _lock:
        unload_models()
        for unload in _unload_callbacks:
            unload()
        return _load(model, dtype, device)


def make_room(model: Model, dtype: str, device: str) -> None:
    """Drop the least recently used models until ``model`` fits next to the rest."""
    # transformers dequantizes the weights of a quantized model.
    directory = model.source.directory if isinstance(model, QuantizedModel) else model.directory
    size = sum(file.stat().st_size for pattern in _WEIGHTS for file in directory.glob(pattern))
    if dtype == "float32":  # Assume that the files store two bytes per parameter, which gives the maximum.
        size *= 2
    with _lock:
        sizes = {key: _bytes_of(loaded) for key, loaded in _loaded.items()}
        count = len(sizes)
        memory = gpu_memory(device) if device.startswith("cuda") else system_memory()
        capacity = memory.available + _bytes_on(device, sizes) if memory else 0
        for key in tuple(_loaded):
            if (_max_models is None or len(_loaded) < _max_models) and _bytes_on(
                device, sizes
            ) + size <= _SHARE * capacity:
                break
            del _loaded[key], sizes[key]
        if len(sizes) < count:
            _release_memory()


def hold_at_most(models: int | None) -> None:
    """Limit the number of models in memory, even if more would fit. None removes the limit."""
    global _max_models
    _max_models = models


def unload_models() -> None:
    """Drop all models and release their memory."""
    with _lock:
        if _loaded:
            _loaded.clear()
            _release_memory()


def _release_memory() -> None:
    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _bytes_of(loaded_model: LoadedModel) -> int:
    return sum(int(tensor.nbytes) for tensor in (*loaded_model.network.parameters(), *loaded_model.network.buffers()))


def _bytes_on(device: str, sizes: Mapping[_CacheKey, int]) -> int:
    return sum(size for (_, _, model_device), size in sizes.items() if model_device == device)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the sha256 of the state that determines how a tokenizer splits text.

    Two copies of one tokenizer have the same digest, even if they are stored in different formats.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return digest({"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()})
    # Padding and truncation only reflect the last call of the tokenizer.
    state = {name: part for name, part in json.loads(backend.to_str()).items() if name not in ("padding", "truncation")}
    return digest({"tokenizer": state, "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id})


def _require_dequantizer(model: Model, location: str) -> None:
    """Raise InvalidInput if the weights are quantized and the library that transformers needs for them is missing."""
    try:
        settings = read_json(model.directory / "config.json").get("quantization_config")
    except InvalidInput:
        return  # transformers reports it
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method == "compressed-tensors" and importlib.util.find_spec("compressed_tensors") is None:
        raise InvalidInput(
            location,
            found="the weights are quantized, and compressed-tensors is not installed",
            expected="the package with which transformers loads such weights",
            remedy=pip_command("mergegate[variants]"),
        )


def _load(model: Model, dtype: str, device: str) -> LoadedModel:
    location = f"{model.name} ({model.directory})"
    _require_dequantizer(model, location)
    kind = kind_of_directory(model.directory)
    if not kind.loader:
        raise InvalidInput(
            location,
            found=f"{kind.noun}, for which neither transformers nor sentence-transformers has a class",
            expected="a model that one of them can load and evaluate",
        )
    import_lean("accelerate", "transformers.modeling_utils")
    import transformers

    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        load = _load_transformer if kind.loading_library == "transformers" else _load_sentence_transformer
        loaded, missing, ignored = load(model, kind, dtype, device)
    except InvalidInput:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfModelMemory(
                location,
                found=f"the model does not fit into the memory of {device}",
                remedy="use dtype: bfloat16, or more memory",
            ) from error
        # A damaged file can make transformers, tokenizers or safetensors raise many different types.
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(
            location,
            found=f"{kind.loading_library} cannot load the model: {cause[:300]}",
            expected=f"{kind.noun} in safetensors, with its tokenizer",
        ) from error
    # transformers would initialize missing tensors with random numbers and continue.
    if missing:
        more = f" (and {len(missing) - 1} more tensors)" if len(missing) > 1 else ""
        raise InvalidInput(
            location, found=f"{missing[0]} is missing or has a wrong shape{more}", expected="a complete checkpoint"
        )
    if ignored:
        more = f" (and {len(ignored) - 1} more tensors)" if len(ignored) > 1 else ""
        raise InvalidInput(
            location,
            found=f"{type(loaded.network).__name__} does not read {ignored[0]}{more}, so it would not be evaluated",
            expected="a class that reads all tensors",
            remedy="compare architectures in config.json with a parent's",
        )
    return loaded


# Turns the content of each message into a list with one text, for templates that read nothing else.
_CONTENT_AS_PARTS = (
    "{%- set wrapped = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- set content = message['content'] -%}"
    "{%- set content = [{'type': 'text', 'text': content}] if content is string else content -%}"
    "{%- set wrapped.messages = wrapped.messages + [dict(message, content=content)] -%}"
    "{%- endfor -%}{%- set messages = wrapped.messages -%}"
)


def accept_plain_content(tokenizer: Any, kind: ModelKind) -> None:
    """Let the chat template of a model with several modalities accept messages whose content is a text.

    Some templates, such as that of LLaVA 1.5, read only lists of texts and pictures. From a plain text, they silently
    render an empty message. Servers recognize such templates and wrap the text, and so does this function.
    """
    template = tokenizer.chat_template
    if not kind.modalities or not isinstance(template, str):
        return
    probe = [{"role": "user", "content": "mergegate probe"}]
    for adapted in (template, _CONTENT_AS_PARTS + template):
        tokenizer.chat_template = adapted
        with suppress(Exception):  # a template is a program, which may raise anything
            if probe[0]["content"] in tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True):
                return
    tokenizer.chat_template = template


# A loaded model, names of its tensors that the checkpoint lacks, and names in the checkpoint that it does not read.
_Loaded = tuple[LoadedModel, Sequence[str], Sequence[str]]


def _load_transformer(model: Model, kind: ModelKind, dtype: str, device: str) -> _Loaded:
    """Load a model with transformers.

    transformers knows which tensors a class ignores on purpose. Text generators also ignore constants of earlier
    releases, such as the masks of GPT-2, so for them only whole towers count.
    """
    import transformers

    # transformers declares no return types for these calls, so mypy needs the annotations.
    loading_info: Any
    network: Any
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": model.runs_code}
    processor: Any = None
    if "transcription" in kind.task_forms:
        processor = transformers.AutoProcessor.from_pretrained(model.directory, **options)
    tokenizer = (
        processor.tokenizer if processor else transformers.AutoTokenizer.from_pretrained(model.directory, **options)
    )
    accept_plain_content(tokenizer, kind)
    network, loading_info = getattr(transformers, kind.loader).from_pretrained(
        model.directory, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
    )
    unexpected = sorted(map(str, loading_info["unexpected_keys"]))
    ignored = [name for name in unexpected if kind.name != "text generator" or is_of_tower(name)]
    return LoadedModel(network.to(device).eval(), tokenizer, kind, processor), _missing_tensors(loading_info), ignored


def _load_sentence_transformer(model: Model, kind: ModelKind, dtype: str, device: str) -> _Loaded:
    """Load an embedding model or a cross-encoder, with its modules. Heads of its transformer may remain unused."""
    # Older versions run code next to a model even if it is not trusted.
    if int(_version_of("sentence-transformers").partition(".")[0]) < _SENTENCE_TRANSFORMERS:
        raise InvalidInput(
            f"{model.name} ({model.directory})",
            found=f"{kind.noun}, and sentence-transformers {_SENTENCE_TRANSFORMERS} or newer is not installed",
            expected="the package that loads such models",
            remedy=pip_command("mergegate[embeddings]"),
        )
    import_lean("sentence_transformers", exceptions=("scipy",))
    import sentence_transformers

    if not model.runs_code:
        _require_known_functions(model.directory)
    with _record_loading() as infos:
        network = getattr(sentence_transformers, kind.loader)(
            str(model.directory),
            device=device,
            local_files_only=True,
            trust_remote_code=model.runs_code,
            model_kwargs={"dtype": dtype, "use_safetensors": True},
        )
    if network.transformers_model is not None and not infos:
        raise InvalidInput(
            f"{model.name} ({model.directory})",
            found="a transformer that loads itself, so that mergegate cannot find out whether tensors are missing",
            expected="a transformer that from_pretrained of transformers loads",
        )
    network.eval()
    missing = [name for info in infos for name in _missing_tensors(info)]
    return LoadedModel(network, network.tokenizer, kind), _used_tensors(network, missing) if missing else [], []


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "0"


def _missing_tensors(loading_info: Any) -> list[str]:
    mismatched = sorted(str(key) for key in loading_info["mismatched_keys"])
    return [*sorted(loading_info["missing_keys"]), *mismatched]


@contextmanager
def _record_loading() -> Iterator[list[Any]]:
    """Yield a list of transformers' reports about each model that is loaded inside the context.

    sentence-transformers discards the report, and with it the names of tensors that were initialized at random.
    """
    import transformers

    loader: Any = transformers.PreTrainedModel
    original, infos = loader.__dict__["from_pretrained"], []

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        network, info = original.__func__(cls, *args, **{**kwargs, "output_loading_info": True})
        infos.append(info)
        return network

    loader.from_pretrained = classmethod(from_pretrained)
    try:
        yield infos
    finally:
        loader.from_pretrained = original


def _used_tensors(network: Any, missing: Sequence[str]) -> Sequence[str]:
    """Return ``missing`` without the tensors before the first one that affects the output of the model.

    Many embedding models lack the pooler of their class, because their own pooling ignores it. A tensor affects the
    output if other numbers in it change the output.
    """
    import torch

    text = "mergegate"
    is_pair = type(network).__name__ == "CrossEncoder"

    def output() -> Any:
        encode = network.predict if is_pair else network.encode
        values = encode([(text, text) if is_pair else text], convert_to_tensor=True, show_progress_bar=False)
        return values.to_dense() if values.is_sparse else values

    parameters = dict(network.transformers_model.named_parameters())
    before = output()
    for at, name in enumerate(missing):
        if name not in parameters:  # A buffer, or a name that only the file has.
            return missing[at:]
        with torch.no_grad():
            original = parameters[name].clone()
            parameters[name].add_(torch.randn_like(original))
            is_used = not torch.equal(before, output())
            parameters[name].copy_(original)
        if is_used:
            return missing[at:]
    return []


def _require_known_functions(directory: Path) -> None:
    """Raise InvalidInput if a module has an activation function that is not one of torch.

    sentence-transformers replaces a function that is not trusted with a default one and continues.
    """
    file = directory / MODULES_FILE
    modules = parse_json(read_plain(file, JsonBounds().size), str(file)) if file.is_file() else []
    folders = [str(entry.get("path", "")) for entry in modules if isinstance(entry, Mapping)]
    for name in dict.fromkeys(["config.json", *(f"{folder}/config.json" for folder in folders if folder)]):
        if not (file := directory / name).is_file():
            continue
        settings = read_json(file)
        own = settings.get("sentence_transformers")
        named = (
            settings.get("activation_function") if name != "config.json" else None,
            settings.get("sbert_ce_default_activation_function"),
            own.get("activation_fn") if isinstance(own, Mapping) else None,
        )
        paths = (str(each) for each in named if each and "." in str(each))  # relu is a name that a module knows
        if function := next((each for each in paths if not each.startswith("torch.")), None):
            raise InvalidInput(
                str(file),
                found=f"the activation function {function}, which is code outside torch",
                expected="a function of torch, because this profile does not run code of the model",
                remedy="allow the code of this model in the profile, after reading it",
            )
