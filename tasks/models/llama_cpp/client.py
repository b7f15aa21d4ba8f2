"""Run llama.cpp in a supervised process of its own environment, and ask it about one GGUF file, or load a variant.

::

    with open_gguf(path) as model:                       # starts a process; it ends with the block
        model.vocabulary.adds_bos
        model.tokenize(["some text"])
        model.log_probabilities([1, 2, 3], [4, 5])       # nats
        model.generate([1, 2, 3], AnswerChoice(ends=(2,)), 32, room=256)
    quantize(source, destination, "Q4_K_M")
    toolchain()                                          # versions, without a process

The environment is built by ``make gguf-env``. Its library and its Python packages are those of llama.cpp, so mergegate
never imports them: ``child`` runs there. The process is confined like the model process (no network, no secrets), uses
one thread, and ends with this process. Each result depends only on its own request, see ``child``.

``load_gguf`` returns a GGUF variant with the tokenizer and the configuration of the model that was quantized, so code
that tokenizes, divides and truncates text treats it like a transformers model. Its ``network`` is a ``GgufNetwork``,
which computes in llama.cpp. The process stays open for the next call, because the parts of an evaluation are many and
short.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self, TypeGuard

from mergegate.merge_core.errors import InvalidInput, Refused, environment_command, suggest
from mergegate.merge_core.parsing import read_plain
from mergegate.merge_core.system import data_limit
from mergegate.tasks.base.sandbox import NotStarted, ProcessOptions, SupervisedProcess, compile_imports, output_tail
from mergegate.tasks.base.stage import memory_of_mapping_child
from mergegate.tasks.models.checkpoints import (
    LoadedModel,
    Model,
    OutOfModelMemory,
    QuantizedModel,
    child_environment,
    confinement,
    import_lean,
    on_unload,
    unload_models,
)

PYTHON = Path(".venv-gguf/bin/python")  # built by `make gguf-env`
CONVERTER = Path("llama.cpp/convert_hf_to_gguf.py")  # in the environment's directory
FILE_TYPES: Mapping[str, int] = MappingProxyType(
    {
        **{"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q6_K": 18},
        **{"Q5_0": 8, "Q5_1": 9, "Q5_K_S": 16, "Q5_K_M": 17, "Q4_0": 2, "Q4_1": 3, "Q4_K_S": 14, "Q4_K_M": 15},
        **{"Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q2_K": 10, "Q2_K_S": 21},
        **{"IQ4_NL": 25, "IQ4_XS": 30, "IQ3_XXS": 23, "IQ3_XS": 22, "IQ3_S": 26, "IQ3_M": 27},
        **{"IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ2_M": 29, "IQ1_S": 24, "IQ1_M": 31},
        **{"TQ1_0": 36, "TQ2_0": 37},
    }
)
"""Names of the file types that llama.cpp 0.5.0 quantizes to, and their numbers (LLAMA_FTYPE)."""
SETTINGS = "1 thread, float32 cache, no flash attention, batches of 32 tokens"
"""How ``child`` computes. A part of every cache key."""

_CHILD = Path(__file__).with_name("child.py")
_SILENCE_S = 3600.0  # longest time for one answer
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_LAST_WORDS_S = 5.0  # time that a process has to end after it closed its connection
# Lines of the output that tell why llama.cpp or Python ended.
_CAUSE = re.compile(r"GGML_ASSERT|ggml_abort|what\(\):|^\w*(Error|Exception)\b")
_NO_MEMORY = re.compile(r"MemoryError|bad_alloc|[Cc]annot allocate|failed to allocate|out of memory")


@dataclass(frozen=True)
class GgufVocabulary:
    """How llama.cpp reads the vocabulary of a GGUF file."""

    tokens: Mapping[str, int | None]  # ids of bos, eos, eot, pad, sep and nl; None: the file has no such token
    adds_bos: bool  # whether llama.cpp begins every text with bos
    adds_eos: bool
    vocabulary_size: int  # number of tokens
    context_length: int  # tokens for which the model was trained; 0 if only the vocabulary was loaded


@dataclass(frozen=True)
class ScoredTokens:
    """Log-probabilities of the tokens of a continuation."""

    values: tuple[float, ...]  # nats, one for each token
    greedy: bool  # whether each token is the most probable one

    @property
    def total(self) -> float:
        """Log-probability of the continuation in nats."""
        return sum(self.values)


@dataclass(frozen=True)
class AnswerChoice:
    """How the next token of an answer is chosen. A temperature of 0 selects the most probable token.

    Random numbers depend only on ``seed``, on the prompt and on the position in the answer.
    """

    ends: tuple[int, ...] = ()  # tokens that end an answer
    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # as in transformers, over the prompt and the answer
    seed: int = 0


@dataclass(frozen=True)
class ChatAnswer:
    """Answer of llama-cpp-python to a chat, with the chat template in the file."""

    prompt: str  # the messages in the form that the template gives them
    text: str
    finish_reason: str  # 'stop' or 'length'
    prompt_tokens: int


def toolchain(python: Path | None = None) -> dict[str, str]:
    """Return the versions of llama-cpp-python and of the converter, without starting a process.

    ``python`` is the interpreter of their environment. Default: ``.venv-gguf/bin/python`` in the working directory.
    """
    interpreter = find_python(python)
    directory = interpreter.parent.parent
    found = sorted(directory.glob("lib/python*/site-packages/llama_cpp_python-*.dist-info"))
    project = directory / CONVERTER.parent / "gguf-py" / "pyproject.toml"
    if not found or not (directory / CONVERTER).is_file():
        missing = "the converter of llama.cpp" if found else "llama-cpp-python"
        raise environment_error(f"{missing} is not installed for {interpreter}")
    installed = found[-1].name.removesuffix(".dist-info").partition("-")[2]
    version = re.search(r'^version = "([^"]+)"', read_plain(project, 1 << 20).decode(errors="replace"), re.MULTILINE)
    if version is None:
        raise environment_error(f"{project} names no version")
    return {"llama_cpp_python": installed, "gguf": version[1]}


def runtime_versions(python: Path | None = None) -> dict[str, str]:
    """Return the versions and settings that determine what llama.cpp computes, for cache keys."""
    return {"llama_cpp_python": toolchain(python)["llama_cpp_python"], "llama_cpp_settings": SETTINGS}


def _remedy() -> str:
    packages = ("llama-cpp-python", "torch", "transformers", "sentencepiece", "protobuf")
    command = environment_command(PYTHON, "gguf-env", *packages)
    if not command.startswith("make "):
        command += f" && git clone --depth 1 https://github.com/ggml-org/llama.cpp {PYTHON.parents[1] / 'llama.cpp'}"
    return f"set python to an environment with llama-cpp-python, or run {command}"


def environment_error(problem: str) -> InvalidInput:
    """Return the error for an environment in which llama.cpp does not work."""
    expected = "the interpreter of an environment with llama.cpp"
    return InvalidInput("llama.cpp", found=problem, expected=expected, remedy=_remedy())


def find_python(python: Path | None = None) -> Path:
    """Return the absolute path of the interpreter whose environment contains llama.cpp."""
    interpreter = (python or PYTHON).absolute()
    if not interpreter.is_file():
        raise environment_error(f"{interpreter}: no such file")
    return interpreter


class LlamaCpp:
    """A GGUF file that a process has opened. Created by ``open_gguf``."""

    def __init__(self, process: _Process, path: Path, vocabulary: GgufVocabulary) -> None:
        self._process, self.path, self.vocabulary = process, path, vocabulary

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.is_alive

    def tokenize(
        self, texts: Sequence[str], *, special: bool = True, add_special: bool = False
    ) -> list[tuple[int, ...]]:
        """Return the tokens into which llama.cpp splits each text.

        With ``special``, special tokens such as ``<|im_end|>`` in a text count as one token. With ``add_special``, the
        tokens with which the vocabulary begins and ends a text are added.
        """
        arguments = {"texts": list(texts), "special": special, "add_special": add_special}
        return [tuple(tokens) for tokens in self._process.call("tokenize", **arguments)]

    def log_probabilities(self, context: Sequence[int], continuation: Sequence[int]) -> ScoredTokens:
        """Return the log-probabilities of ``continuation`` after ``context``. Neither may be empty."""
        if not context or not continuation:
            raise ValueError("context and continuation must not be empty")
        answer = self._process.call("log_probabilities", context=list(context), continuation=list(continuation))
        return ScoredTokens(tuple(answer["values"]), bool(answer["greedy"]))

    def generate(
        self,
        prompt: Sequence[int],
        choice: AnswerChoice,
        count: int,
        *,
        room: int,
        answer: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Return the next ``count`` tokens of an answer, or fewer if a token of ``choice.ends`` is among them.

        ``room`` is the largest number of tokens in the prompt and the whole answer, equal for all calls of one answer.
        ``answer`` has the tokens that earlier calls returned for it.
        """
        arguments = {"prompt": list(prompt), "answer": list(answer), "count": count, "room": room}
        return tuple(self._process.call("generate", **arguments, choice=asdict(choice)))

    def chat(self, messages: Sequence[Mapping[str, str]], *, tokens: int = 64, room: int = 2048) -> ChatAnswer:
        """Let llama-cpp-python answer ``messages`` with the chat template in the file, without randomness.

        The answer has at most ``tokens`` tokens, and ``room`` includes the prompt.
        """
        arguments = {"messages": [dict(message) for message in messages], "count": tokens, "room": room}
        return ChatAnswer(**self._process.call("chat", path=str(self.path), **arguments))


@contextmanager
def open_gguf(path: Path, python: Path | None = None, *, vocabulary_only: bool = False) -> Iterator[LlamaCpp]:
    """Open a GGUF file, or the first of its shards, in a process of its own, which ends with the block.

    ``vocabulary_only`` loads only the vocabulary, which is enough for ``tokenize``.

    Raises:
        InvalidInput: llama.cpp is not installed, cannot load the file, or crashed. The error has its own message.
        OutOfModelMemory: Memory ran out.
        Refused: There was no answer within an hour.
    """
    with _Process((path,), python) as process:
        answer = process.call("load", path=str(path), vocabulary_only=vocabulary_only)
        yield LlamaCpp(process, path, GgufVocabulary(**answer))


def quantize(
    source: Path, destination: Path, file_type_name: str, *, python: Path | None = None, imatrix: Path | None = None
) -> None:
    """Quantize a GGUF file in F32, F16 or BF16 with one thread. The same inputs give the same bytes.

    ``file_type_name`` is a name in ``FILE_TYPES``. ``imatrix`` has the importance of each weight: an ``.npz`` file with
    a float32 vector for each tensor name.
    """
    if file_type_name not in FILE_TYPES:
        raise InvalidInput(
            f"types: {file_type_name}",
            found="not a quantization type of llama.cpp",
            expected=f"one of {', '.join(FILE_TYPES)}",
            remedy=suggest(file_type_name, FILE_TYPES),
        )
    with _Process((source, *([imatrix] if imatrix else [])), python, write=destination.parent) as process:
        files = {"source": str(source), "destination": str(destination), "imatrix": imatrix and str(imatrix)}
        process.call("quantize", **files, ftype=FILE_TYPES[file_type_name])


def measure_importance(
    source: Path, texts: Sequence[str], destination: Path, *, max_length: int, python: Path | None = None
) -> None:
    """Measure how much each input of each matrix matters: its mean square while the model reads ``texts``.

    The result in ``destination`` is for ``quantize``. Each text is cut to ``max_length`` tokens.
    """
    with _Process((source,), python, write=destination.parent) as process:
        files = {"path": str(source), "destination": str(destination)}
        process.call("write_importance", **files, texts=list(texts), most=max_length)


def _memory_limit() -> int | None:
    """Return the memory limit of the process in bytes, which must not exceed that of this process."""
    limits = [memory_of_mapping_child(), data_limit()]
    return min((limit for limit in limits if limit is not None), default=None)


class _Process:
    """A running ``child`` process and its connection."""

    def __init__(self, files: tuple[Path, ...], python: Path | None, write: Path | None = None) -> None:
        python = find_python(python)
        self._path = files[0]
        for package in python.parent.parent.glob("lib/python*/site-packages/llama_cpp"):
            compile_imports(python, "import llama_cpp", package / "llama_chat_format.py", child_environment())
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``__exit__``
        self._channel, child_end = socket.socketpair()
        self._lines = self._channel.makefile("rb")
        try:
            self._process = SupervisedProcess(
                # -I keeps the working directory, PYTHONPATH and the user's packages out of the import path.
                [str(python), "-I", str(_CHILD), str(child_end.fileno())],
                child_environment() | _ENVIRONMENT,
                self._output,
                ProcessOptions(
                    "llama",
                    pass_fds=(child_end.fileno(),),
                    confinement=confinement(files, write=write, memory=_memory_limit()),
                ),
            )
        except NotStarted as error:
            self._close()
            raise environment_error(f"{python}: {error}") from None
        except BaseException:
            self._close()
            raise
        finally:
            child_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()
        self._close()

    @property
    def is_alive(self) -> bool:
        return self._process.alive

    def call(self, name: str, **arguments: Any) -> Any:
        """Send a request and return its result."""
        request = json.dumps({"call": name, **arguments}).encode() + b"\n"
        line = b""
        with suppress(ConnectionError, TimeoutError):
            self._channel.settimeout(_SILENCE_S)
            self._channel.sendall(request)
            line = self._lines.readline()
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise self._refusal(str(answer["error"]))
            return answer["result"]
        except (ValueError, KeyError, TypeError):
            raise self._death() from None

    def _close(self) -> None:
        self._lines.close()
        self._channel.close()
        self._output.close()

    def _refusal(self, message: str) -> InvalidInput:
        if _NO_MEMORY.search(message):
            return self._memory_error(message)
        return InvalidInput(str(self._path), found=message)

    def _death(self) -> InvalidInput | Refused:
        """End the process, and return an error with the reason why it did not answer."""
        was_running = self._process.alive and not self._process.ends(_LAST_WORDS_S)
        code = self._process.end().returncode
        if was_running:
            return Refused(
                str(self._path),
                found=f"llama.cpp did not finish within {_SILENCE_S:g} s, so mergegate stopped it",
                expected="an answer in time",
            )
        lines = [line.strip() for line in output_tail(self._output).splitlines() if line.strip()]
        cause = next((line for line in lines if _CAUSE.search(line)), lines[-1] if lines else "")[:300]
        if code is None or code == -signal.SIGKILL:
            return self._memory_error("killed by signal 9, which the system sends when memory is full")
        if _NO_MEMORY.search(cause):
            return self._memory_error(cause)
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
        return InvalidInput(
            str(self._path),
            found=f"llama.cpp's process ended {how}" + (f": {cause}" if cause else ""),
            expected="an answer",
            remedy=_remedy() if "llama_cpp" in cause or "numpy" in cause else "",
        )

    def _memory_error(self, message: str) -> OutOfModelMemory:
        return OutOfModelMemory(
            str(self._path),
            found=f"llama.cpp ran out of memory: {message}",
            expected="enough memory for the file and its cache, within limits.memory if the profile sets it",
            remedy="increase limits.memory if the profile sets it, or reduce max_length",
        )


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
    """Provide a GGUF variant, to one thread at a time. Its process ends when another model is loaded."""
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
