"""Answer requests about a GGUF file with llama.cpp, as a program of the environment that contains it.

It runs by path, in an interpreter that has llama-cpp-python and NumPy but not mergegate. ``client`` starts it and
describes the requests. Each request and each response is one line of JSON on the connection whose file descriptor is
the only argument: ``{"call": name, ...}``, and ``{"result": ...}`` or ``{"error": message}``.

**Every result depends on its own request only.** llama.cpp computes the same token with other last digits if other
tokens are in its batch. So a request is always divided in the same way: its context into batches of ``BATCH`` tokens,
what follows the context into further batches, and a generated token alone. The cache of keys and values keeps the
batches of the last request. A request that begins with the same batches continues there, which gives the same bits,
because each batch sees the same cache as it would see without the earlier request.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as library

BATCH = 32  # tokens that are computed together
_SMALLEST = 256  # tokens; the cache has room for the next power of two of a request
_F32 = 0  # GGML_TYPE_F32
_WARNING, _ERROR, _CONTINUED = 3, 4, 5  # levels of llama.cpp's log

_log: deque[tuple[int, str]] = deque(maxlen=50)  # level and text of warnings and errors


class Failure(Exception):
    """llama.cpp failed. The message contains its own explanation."""

    def __init__(self, problem: str) -> None:
        errors = [text for level, text in _log if level == _ERROR] or [text for _, text in _log][-1:]
        super().__init__(f"{problem}: {errors[0]}" if errors else problem)


def _record_log(level: int, text: bytes, _: object) -> None:
    line = " ".join(text.decode(errors="replace").replace("=", " ").split())
    if level == _CONTINUED and _log and line:
        _log.append((_log[-1][0], line))
    elif level in (_WARNING, _ERROR) and line:
        _log.append((level, line))


class Network:
    """A loaded GGUF file, and the batches that its cache contains."""

    def __init__(self, path: str, *, vocabulary_only: bool, observer: Any = None) -> None:
        parameters = library.llama_model_default_params()
        parameters.n_gpu_layers, parameters.vocab_only = 0, vocabulary_only
        self._path, self._observer = path, observer
        self._model = library.llama_model_load_from_file(path.encode(), parameters)
        if not self._model:
            raise Failure("llama.cpp cannot load the file")
        self._vocabulary = library.llama_model_get_vocab(self._model)
        self.size = int(library.llama_vocab_n_tokens(self._vocabulary))
        self._context: Any = None
        self._room = 0  # largest number of tokens in the context
        self._batch = library.llama_batch_init(BATCH, 0, 1)
        self._cached: list[tuple[int, ...]] = []  # batches in the cache
        self._ends: dict[int, Any] = {}  # logits after the last token of so many batches in the cache

    def describe(self) -> dict[str, Any]:
        """Return how llama.cpp reads the vocabulary and the length of the context."""
        vocabulary, absent = self._vocabulary, library.LLAMA_TOKEN_NULL
        tokens = {
            name: None if (token := int(getattr(library, f"llama_vocab_{name}")(vocabulary))) == absent else token
            for name in ("bos", "eos", "eot", "pad", "sep", "nl")
        }
        return {
            "tokens": tokens,
            "adds_bos": bool(library.llama_vocab_get_add_bos(vocabulary)),
            "adds_eos": bool(library.llama_vocab_get_add_eos(vocabulary)),
            "vocabulary_size": self.size,
            "context_length": int(library.llama_model_n_ctx_train(self._model)),
        }

    def tokenize(self, texts: Sequence[str], special: bool, add_special: bool) -> list[list[int]]:
        """Return the tokens of each text. ``special``: the text may contain special tokens."""
        results = []
        for text in texts:
            content = text.encode()
            room = len(content) + 8
            buffer = (library.llama_token * room)()
            count = library.llama_tokenize(self._vocabulary, content, len(content), buffer, room, add_special, special)
            if count < 0:
                raise Failure("llama.cpp cannot tokenize a text")
            results.append(list(buffer[:count]))
        return results

    def compute(self, tokens: Sequence[int], room: int) -> None:
        """Compute a text of at most ``room`` tokens from its beginning, so that the observer sees all of it."""
        self._reserve(room)
        self._forget_after(0)
        for batch in _divide(tokens):
            self._decode(batch, "every")
            self._cached.append(batch)

    def log_probabilities(self, context: Sequence[int], continuation: Sequence[int]) -> dict[str, Any]:
        """Return the log-probability of each token of ``continuation`` in nats, and whether all are the argmax."""
        self._reserve(len(context) + len(continuation) - 1)
        batches = _divide(context)
        self._ends = {len(batches): self._read(batches)}  # the next request may have the same context
        values = [_log_softmax_at(self._ends[len(batches)], continuation[0])]
        is_greedy = int(self._ends[len(batches)].argmax()) == continuation[0]
        for batch in _divide(continuation[:-1]):
            batches.append(batch)
            for row in self._read(batches, every=True):
                target = continuation[len(values)]
                values.append(_log_softmax_at(row, target))
                is_greedy &= int(row.argmax()) == target
        return {"values": values, "greedy": is_greedy}

    def generate(
        self, prompt: Sequence[int], answer: Sequence[int], count: int, room: int, choice: dict[str, Any]
    ) -> list[int]:
        """Return the ``count`` tokens that follow ``prompt`` and ``answer``, or fewer, up to an end of text.

        ``room`` is the largest number of tokens in the prompt and the answer, ``choice`` has the tokens that end a text
        (``ends``) and the settings of ``_choose``.
        """
        self._reserve(room)
        batches = [*_divide(prompt), *((token,) for token in answer)]
        tokens: list[int] = []
        while len(tokens) < count and not (tokens and tokens[-1] in choice["ends"]):
            logits = self._read(batches)
            self._ends = {len(batches): logits}
            tokens.append(_choose(logits, [*prompt, *answer, *tokens], len(prompt), choice))
            batches.append((tokens[-1],))
        return tokens

    def _read(self, batches: Sequence[tuple[int, ...]], *, every: bool = False) -> Any:
        """Compute ``batches`` and return the logits after the last token, or after ``every`` token of the last batch.

        Batches that are in the cache are not computed again.
        """
        shared = 0
        while shared < min(len(self._cached), len(batches)) and self._cached[shared] == batches[shared]:
            shared += 1
        if shared == len(batches):
            if not every and shared in self._ends:
                self._forget_after(shared)
                if len(self._cached) == shared:
                    return self._ends[shared]
            shared -= 1
        self._forget_after(shared)
        logits = np.empty((0, self.size), np.float32)
        for index in range(len(self._cached), len(batches)):
            is_last = index == len(batches) - 1
            logits = self._decode(batches[index], "every" if is_last and every else "last" if is_last else "none")
            self._cached.append(batches[index])
        return logits if every else logits[-1]

    def _reserve(self, length: int) -> None:
        """Open a context with room for ``length`` tokens. Its size must not depend on other requests."""
        room = max(_SMALLEST, 1 << (length - 1).bit_length())
        if room == self._room:
            return
        if self._context:
            library.llama_free(self._context)
        self._cached, self._ends, self._room, self._context = [], {}, 0, None
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = room, BATCH, BATCH, 1
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = _F32
        settings.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.offload_kqv = settings.op_offload = False
        if self._observer is not None:
            settings.cb_eval = self._observer
        settings.swa_full = settings.kv_unified = settings.no_perf = True
        self._context = library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise Failure(f"llama.cpp cannot allocate a cache for {room:,} tokens")
        self._room = room

    def _forget_after(self, batches: int) -> None:
        """Remove all but the first ``batches`` from the cache, or all if the network cannot forget a part."""
        if len(self._cached) <= batches:
            return
        memory = library.llama_get_memory(self._context)
        begin = sum(map(len, self._cached[:batches]))
        if not (begin and library.llama_memory_seq_rm(memory, 0, begin, -1)):  # False: a state instead of a cache
            library.llama_memory_clear(memory, True)
            batches = 0
        del self._cached[batches:]
        self._ends = {count: logits for count, logits in self._ends.items() if count <= batches}

    def _decode(self, tokens: Sequence[int], outputs: str) -> Any:
        """Compute one batch after the cached ones.

        Return the logits of ``every`` token, of the ``last`` one or of ``none``, ``[tokens, vocabulary]``.
        """
        batch, begin = self._batch, sum(map(len, self._cached))
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            if not 0 <= token < self.size:
                raise Failure(f"token {token} is not in the file's vocabulary of {self.size:,} tokens")
            batch.token[index], batch.pos[index] = token, begin + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = outputs == "every" or (outputs == "last" and index == len(tokens) - 1)
        if code := library.llama_decode(self._context, batch):
            library.llama_memory_clear(library.llama_get_memory(self._context), True)
            self._cached, self._ends = [], {}
            raise Failure(f"llama.cpp cannot compute a batch (code {code})")
        rows = {"every": len(tokens), "last": 1, "none": 0}[outputs]
        if not rows:
            return np.empty((0, self.size), np.float32)
        return np.ctypeslib.as_array(library.llama_get_logits(self._context), shape=(rows, self.size)).copy()


def _divide(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + BATCH]) for start in range(0, len(tokens), BATCH)]


def _log_softmax_at(logits: Any, token: int) -> float:
    values = logits.astype(np.float64)
    largest = values.max()
    return float(values[token] - largest - np.log(np.exp(values - largest).sum()))


def _choose(logits: Any, previous: Sequence[int], start: int, choice: dict[str, Any]) -> int:
    """Return the next token: the argmax, or a random one.

    The random number depends on the prompt, the ``seed`` and the number of tokens since the prompt, which has ``start``
    tokens. ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``repetition_penalty`` have the meaning that they have
    in transformers.
    """
    values = logits.astype(np.float64)
    if (penalty := choice.get("repetition_penalty") or 1.0) != 1.0:
        seen = np.unique(previous)
        values[seen] = np.where(values[seen] < 0, values[seen] * penalty, values[seen] / penalty)
    if not (temperature := choice.get("temperature")):
        return int(values.argmax())
    values /= temperature
    if (top_k := choice.get("top_k") or 0) and top_k < len(values):
        values[values < np.partition(values, -top_k)[-top_k]] = -math.inf
    order = np.argsort(-values, kind="stable")
    probabilities = np.exp(values[order] - values[order[0]])
    probabilities /= probabilities.sum()
    if (top_p := choice.get("top_p") or 1.0) < 1.0:
        probabilities[1:][np.cumsum(probabilities)[:-1] >= top_p] = 0.0
    if min_p := choice.get("min_p"):
        probabilities[probabilities < min_p * probabilities[0]] = 0.0
    source = json.dumps([choice.get("seed"), list(previous[:start]), len(previous) - start])
    drawn = int.from_bytes(hashlib.sha256(source.encode()).digest()[:7], "big") / 256**7
    bounds = np.cumsum(probabilities)
    return int(order[int(np.searchsorted(bounds, drawn * bounds[-1], side="right"))])


def quantize_file(source: str, destination: str, ftype: int, imatrix: str | None) -> None:
    """Write ``source`` with the weights of type ``ftype`` (LLAMA_FTYPE) to ``destination``."""
    parameters = library.llama_model_quantize_default_params()
    parameters.nthread, parameters.ftype = 1, ftype
    entries = None
    if imatrix is not None:
        with np.load(imatrix) as stored:
            names = sorted(stored.files)
            arrays = [np.ascontiguousarray(stored[name], np.float32) for name in names]
        entries = (library.llama_model_imatrix_data * (len(names) + 1))()  # the last entry has no name
        for entry, name, array in zip(entries, names, arrays, strict=False):
            entry.name, entry.size = name.encode(), array.size
            entry.data = array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        parameters.imatrix = entries
    if library.llama_model_quantize(source.encode(), destination.encode(), ctypes.byref(parameters)):
        raise Failure("llama.cpp cannot quantize the file")


class _Tensor(ctypes.Structure):
    """``struct ggml_tensor`` of ggml 0.25. ``_InputStatistics`` compares two fields with ggml's own functions."""

    _fields_ = (
        *(("type", ctypes.c_int), ("buffer", ctypes.c_void_p)),
        *(("sizes", ctypes.c_int64 * 4), ("strides", ctypes.c_size_t * 4)),
        *(("op", ctypes.c_int), ("op_parameters", ctypes.c_int32 * 16), ("flags", ctypes.c_int32)),
        *(("sources", ctypes.c_void_p * 10), ("view_source", ctypes.c_void_p), ("view_offset", ctypes.c_size_t)),
        *(("data", ctypes.c_void_p), ("name", ctypes.c_char * 64), ("extra", ctypes.c_void_p)),
    )


class _InputStatistics:
    """Mean square of each input of each weight matrix, over all tokens that llama.cpp computes."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, Any]] = {}  # number of inputs, and their sum of squares, by tensor
        self.problem = ""
        folder = Path(library.__file__).parent / "lib"
        ggml = ctypes.CDLL(str(folder / "libggml-base.so"))
        self._name_of, self._operation_of, self._data_of = ggml.ggml_get_name, ggml.ggml_op_desc, ggml.ggml_get_data
        for function in (self._name_of, self._operation_of, self._data_of):
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_char_p
        self._data_of.restype = ctypes.c_void_p

    def observe(self, address: int, ask: bool, _: object) -> bool:
        """Answer llama.cpp's callback: whether it shall show this tensor, or continue after it has shown it."""
        operation = self._operation_of(address)
        if operation not in (b"MUL_MAT", b"MUL_MAT_ID"):
            return not ask
        product = ctypes.cast(address, ctypes.POINTER(_Tensor)).contents
        name = self._name_of(product.sources[0]).decode()
        if not name.endswith(".weight"):
            return not ask
        if operation == b"MUL_MAT_ID":
            self.problem = f"{name} belongs to experts, whose importance mergegate does not measure"
            return False
        if not ask:
            self._add(name, product.sources[1])
        return not self.problem

    def _add(self, name: str, address: int) -> None:
        inputs = ctypes.cast(address, ctypes.POINTER(_Tensor)).contents
        width, rows = inputs.sizes[0], inputs.sizes[1] * inputs.sizes[2] * inputs.sizes[3]
        is_known = inputs.name == self._name_of(address) and inputs.data == self._data_of(address)
        if not is_known or inputs.type != _F32 or list(inputs.strides)[:2] != [4, 4 * width]:
            self.problem = f"the inputs of {name} have a layout that mergegate does not know"
            return
        values = np.ctypeslib.as_array(ctypes.cast(inputs.data, ctypes.POINTER(ctypes.c_float)), shape=(rows, width))
        count, squares = self._sums.get(name, (0, np.zeros(width)))
        self._sums[name] = (count + rows, squares + (values.astype(np.float64) ** 2).sum(axis=0))

    def means(self) -> dict[str, Any]:
        """Return the mean squares as float32, by the name of the matrix."""
        return {name: (squares / count).astype(np.float32) for name, (count, squares) in self._sums.items()}


def write_importance(path: str, texts: Sequence[str], most: int, destination: str) -> None:
    """Write the mean square of each input of each matrix to ``destination`` (``.npz``).

    These are the numbers of llama.cpp's program ``imatrix``. Each text is cut to ``most`` tokens.
    """
    statistics = _InputStatistics()
    callback = library.ggml_backend_sched_eval_callback(statistics.observe)
    network = Network(path, vocabulary_only=False, observer=callback)
    for tokens in network.tokenize(texts, True, True):
        if tokens:
            network.compute(tokens[:most], most)
        if statistics.problem:
            raise Failure(statistics.problem)
    np.savez(destination, **statistics.means())


def chat(path: str, messages: list[dict[str, str]], count: int, room: int) -> dict[str, Any]:
    """Answer a chat as a user of llama-cpp-python would, with the template in the file and without randomness."""
    from llama_cpp import Llama
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    settings = {"n_threads": 1, "n_threads_batch": 1, "n_gpu_layers": 0, "verbose": False, "seed": 0}
    try:
        model = Llama(path, n_ctx=room, **settings)
    except ValueError as error:
        raise Failure(f"llama.cpp cannot load the file ({error})") from None
    template = model.metadata.get("tokenizer.chat_template")
    if not template:
        raise Failure("the file has no chat template")
    texts = {
        name: model._model.token_get_text(token) if (token := number()) >= 0 else ""
        for name, number in (("bos_token", model.token_bos), ("eos_token", model.token_eos))
    }
    try:
        prompt = Jinja2ChatFormatter(template, texts["eos_token"], texts["bos_token"])(messages=messages).prompt
        answer = model.create_chat_completion(messages, temperature=0.0, max_tokens=count)
    except Exception as error:  # templates raise exceptions of many types
        raise Failure(f"the file's chat template fails: {type(error).__name__}: {error}") from None
    (first,) = answer["choices"]
    return {
        "prompt": prompt,
        "text": first["message"]["content"] or "",
        "finish_reason": first["finish_reason"],
        "prompt_tokens": answer["usage"]["prompt_tokens"],
    }


def main() -> None:
    """Answer requests until the parent process closes the connection."""
    callback = library.llama_log_callback(_record_log)  # must exist as long as llama.cpp may call it
    library.llama_log_set(callback, ctypes.c_void_p(0))
    library.llama_backend_init()
    network: Network | None = None

    def load(path: str, vocabulary_only: bool) -> dict[str, Any]:
        nonlocal network
        network = Network(path, vocabulary_only=vocabulary_only)
        return network.describe()

    calls: dict[str, Callable[..., Any]] = {
        **{"load": load, "quantize": quantize_file, "chat": chat},
        "write_importance": write_importance,
    }
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            name = request.pop("call")
            _log.clear()
            try:
                response = {"result": (calls.get(name) or getattr(network, name))(**request)}
            except Failure as failure:
                response = {"error": str(failure)}
            channel.sendall(json.dumps(response).encode() + b"\n")


if __name__ == "__main__":
    main()
