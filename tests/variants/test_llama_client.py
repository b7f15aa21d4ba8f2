"""The client of llama.cpp turns everything that can happen to its process into an error that says what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import make_model
from traps import ends

from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.tasks.base.store import digest
from mergegate.tasks.models import llama_cpp
from mergegate.tasks.models.checkpoints import OutOfModelMemory, QuantizedModel
from mergegate.tasks.models.llama_cpp import client
from mergegate.tasks.quality.evaluation import Scoring, find_backend

VOCABULARY = {"tokens": {"bos": 1, "eos": 2, "eot": None, "pad": None, "sep": None, "nl": None}, "adds_bos": True}
VOCABULARY |= {"adds_eos": False, "vocabulary_size": 30, "context_length": 64}
# Loads any file. For every other request, it does what the file says.
PROGRAM = f"""#!{sys.executable}
import json, os, signal, socket, subprocess, sys, time
assert sys.argv[1] == "-I" and sys.argv[2].endswith("child.py"), sys.argv
channel = socket.socket(fileno=int(sys.argv[3]))
deed = "pass"
for line in channel.makefile("rb"):
    request = json.loads(line)
    result = None
    if request["call"] == "load":
        deed, result = open(request["path"]).read(), {VOCABULARY!r}
    else:
        deed = open(request["source"]).read() if request["call"] == "quantize" else deed
        exec(deed)
    channel.sendall(json.dumps({{"result": result}}).encode() + b"\\n")
"""

PROFILE = """name: p
recipe: recipe.yaml
evaluate:
  backend: {}
  tasks: [{{task: piqa, guarded_by: parents}}]
"""

Environment = Callable[..., Path]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Return a function that writes an environment and returns its interpreter, which is ``PROGRAM``."""

    def write(*, installed: str | None = "0.3.36", converter: str | None = "0.19.0", name: str = "gguf") -> Path:
        root = tmp_path / name
        python = root / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PROGRAM)
        python.chmod(0o755)
        if installed is not None:
            (root / "lib/python3.11/site-packages" / f"llama_cpp_python-{installed}.dist-info").mkdir(parents=True)
        if converter is not None:
            (root / "llama.cpp/gguf-py").mkdir(parents=True)
            (root / "llama.cpp/convert_hf_to_gguf.py").touch()
            (root / "llama.cpp/gguf-py/pyproject.toml").write_text(f'[tool.poetry]\nversion = "{converter}"\n')
        return python

    return write


def file_that(tmp_path: Path, deed: str) -> Path:
    path = tmp_path / "weights.gguf"
    path.write_text(deed)
    return path


def test_results_have_types_and_units(environment: Environment, tmp_path: Path) -> None:
    deed = (
        "name = request['call']\n"
        "if name == 'generate': result = [len(request['prompt']), request['count'], request['choice']['ends'][0]]\n"
        "if name == 'log_probabilities': result = {'values': [-1.5, -0.25], 'greedy': True}\n"
        "if name == 'tokenize': result = [[3, 4]]\n"
        "if name == 'chat': result = {'prompt': 'p', 'text': 't', 'finish_reason': 'stop', 'prompt_tokens': 5}"
    )
    with llama_cpp.open_gguf(file_that(tmp_path, deed), environment()) as model:
        assert model.vocabulary.adds_bos
        assert model.vocabulary.tokens["eos"] == 2
        score = model.log_probabilities([1], [2, 3])
        assert (score.values, score.total, score.greedy) == ((-1.5, -0.25), -1.75, True)
        assert model.generate([1, 2], llama_cpp.AnswerChoice(ends=(9,)), 4, room=8) == (2, 4, 9)
        assert model.tokenize(["text"]) == [(3, 4)]
        assert model.chat([{"role": "user", "content": "Hi"}]).text == "t"
        with pytest.raises(ValueError, match="must not be empty"):
            model.log_probabilities([], [1])


@pytest.mark.parametrize(
    ("deed", "error", "message"),
    [
        ("os.kill(os.getpid(), 9)", OutOfModelMemory, "killed by signal 9, which the system sends when memory is full"),
        ("os.abort()", InvalidInput, r"llama.cpp's process ended by signal 6 \(SIGABRT\)"),
        (
            "print('ggml.c:12: GGML_ASSERT(x) failed\\nno debugger', flush=True); os.abort()",
            InvalidInput,
            r"SIGABRT\): ggml.c:12: GGML_ASSERT\(x\) failed",
        ),
        ("raise KeyError('x')", InvalidInput, "ended with exit code 1: KeyError: 'x'"),
        ("raise MemoryError", OutOfModelMemory, "llama.cpp ran out of memory: MemoryError"),
        ("import llama_cpp", InvalidInput, "No module named 'llama_cpp'\n.*\n.*or run make gguf-env"),
        ("os._exit(0)", InvalidInput, "ended with exit code 0"),
        ("channel.sendall(b'no json\\n'); time.sleep(0.1); os._exit(1)", InvalidInput, "ended with exit code 1"),
        ("channel.sendall(b'[1]\\n'); os._exit(1)", InvalidInput, "ended with exit code 1"),
        ('channel.sendall(b\'{"error": "wrong magic"}\\n\'); os._exit(1)', InvalidInput, "wrong magic"),
        ('channel.sendall(b\'{"error": "bad_alloc"}\\n\'); os._exit(1)', OutOfModelMemory, "bad_alloc"),
    ],
)
def test_the_end_of_the_process_is_an_error_that_names_file_and_cause(
    environment: Environment, tmp_path: Path, deed: str, error: type[MergegateError], message: str
) -> None:
    path = file_that(tmp_path, deed)
    with llama_cpp.open_gguf(path, environment()) as model, pytest.raises(error, match=message) as raised:
        model.tokenize(["text"])
    assert type(raised.value) is error
    assert str(raised.value).startswith(str(path))


@pytest.mark.story
def test_a_process_that_exceeds_its_time_is_stopped_with_its_children(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deed = (
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(os.getpid(), other.pid, flush=True); time.sleep(600)"
    )
    with llama_cpp.open_gguf(file_that(tmp_path, deed), environment()) as model:
        monkeypatch.setattr(client, "_SILENCE_S", 4.0)
        with pytest.raises(Refused, match="did not finish within 4 s, so mergegate stopped it"):
            model.tokenize(["text"])
        model._process._output.seek(0)
        started = [int(word) for word in model._process._output.read().split()]
    assert len(started) == 2
    assert all(ends(each) for each in started)


def test_the_process_has_neither_secrets_nor_network(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    deed = (
        "connected = socket.socket().connect_ex(('127.0.0.1', 9)) == 0;"
        "result = [[int('HF_TOKEN' in os.environ), int(connected), int(os.environ['OMP_NUM_THREADS'])]]"
    )
    with llama_cpp.open_gguf(file_that(tmp_path, deed), environment()) as model:
        assert model.tokenize(["text"]) == [(0, 0, 1)]


def test_quantizing_reports_errors_of_the_process(environment: Environment, tmp_path: Path) -> None:
    source = file_that(tmp_path, 'channel.sendall(b\'{"error": "no space"}\\n\'); os._exit(1)')
    with pytest.raises(InvalidInput, match=r"weights.gguf: no space"):
        llama_cpp.quantize(source, tmp_path / "out.gguf", "Q8_0", python=environment())
    with pytest.raises(InvalidInput, match=r"types: Q8_1: not a quantization type of llama.cpp"):
        llama_cpp.quantize(source, tmp_path / "out.gguf", "Q8_1", python=environment(name="other"))


def test_an_incomplete_or_missing_environment_names_the_command_that_builds_it(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for message, find in (
        ("llama-cpp-python", lambda: llama_cpp.toolchain(environment(installed=None, name="a"))),
        ("the converter of llama.cpp", lambda: llama_cpp.toolchain(environment(converter=None, name="b"))),
        (f"{tmp_path}/.venv-gguf/bin/python: no such file", llama_cpp.toolchain),
        (f"{tmp_path}/.venv-gguf/bin/python: no such file", llama_cpp.runtime_versions),
    ):
        with pytest.raises(InvalidInput, match=f"^llama.cpp: {message}.*\n.*\n.*or run python3 -m venv .venv-gguf && "):
            find()
    with pytest.raises(InvalidInput, match="/bin/pip install llama-cpp-python"), llama_cpp.open_gguf(tmp_path / "x"):
        pass


def variant(tmp_path: Path, python: Path) -> QuantizedModel:
    settings = {"name": "Q8_0", "digest": "d" * 64, "directory": tmp_path, "backend": "llama_cpp", "python": python}
    settings |= {"source": make_model(tmp_path / "merge"), "weights": file_that(tmp_path, "result = []").name}
    return QuantizedModel(**settings, runtime=tuple(sorted(llama_cpp.runtime_versions(python).items())))


def test_the_version_of_llama_cpp_is_in_the_key_and_its_place_is_not(environment: Environment, tmp_path: Path) -> None:
    python = environment()
    model = variant(tmp_path, python)
    assert digest(model) == digest(model.model_copy(update={"python": tmp_path / "elsewhere"}))
    for other in ({"runtime": (("llama_cpp_python", "0.3.37"),)}, {"weights": "x"}, {"backend": "hf"}):
        assert digest(model) != digest(model.model_copy(update=other))


def test_a_changed_environment_is_noticed_before_anything_is_evaluated(
    environment: Environment, tmp_path: Path
) -> None:
    python, newer = environment(), environment(installed="0.3.37", name="newer")
    model = variant(tmp_path, python)
    with llama_cpp.load_gguf(model) as loaded:
        assert (loaded.embeddings, loaded.context, loaded.prefix) == (30, 64, 1)
    llama_cpp.close_gguf()
    message = r"llama.cpp with llama_cpp_python 0.3.37, .*\n.*llama_cpp_python 0.3.36, .*\n.*run again"
    with pytest.raises(InvalidInput, match=message), llama_cpp.load_gguf(model.model_copy(update={"python": newer})):
        pass


def test_only_quantized_models_of_llama_cpp_run_there(environment: Environment, tmp_path: Path) -> None:
    model = variant(tmp_path, environment())
    assert llama_cpp.runs_in_llama_cpp(model)
    assert not llama_cpp.runs_in_llama_cpp(model.source)
    assert not llama_cpp.runs_in_llama_cpp(model.model_copy(update={"backend": "hf"}))
    message = r"for merge .*a checkpoint in safetensors\n.*a GGUF variant\n.*use backend: hf"
    merge = find_backend("llama_cpp").opened(model.source, Scoring(), "cpu")
    with pytest.raises(InvalidInput, match=message), merge:
        pass


def test_a_profile_cannot_select_the_backend_for_its_merge(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(PROFILE.format("llama_cpp"))
    with pytest.raises(InvalidInput, match="llama_cpp evaluates only variants: set it to hf, and list the types"):
        load_profile(path)
    path.write_text(PROFILE.format("llama"))
    with pytest.raises(InvalidInput, match="expected: one of hf, vllm, served") as raised:
        load_profile(path)
    assert "llama_cpp" not in str(raised.value)
