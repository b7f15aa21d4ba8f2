"""Open an adapter on disk without reading its weights, grouped by module, and write a new one that PEFT can read.

The layout is PEFT's: ``adapter_config.json`` and ``adapter_model.safetensors``, whose tensors have names like
``base_model.model.<module>.<kind>``. Modules are named as in the loaded model (*in memory*), not as on disk.

The configuration names every module by its full path, because a short name such as ``up_proj`` would also match modules
that were not adapted.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.adapters.configuration import CONFIG_FILE, AdapterConfig, read_adapter_config
from mergegate.merge_core.architecture import kind_of
from mergegate.merge_core.checkpoint import (
    BY_TORCH_NAME,
    Checkpoint,
    Companions,
    ReadStored,
    StoredTensor,
    companion_kind,
    list_companions,
    list_uncopied,
    numbers,
    patterns,
    read_header,
    read_pickled,
    render_header,
)
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import check_entries

if TYPE_CHECKING:
    import torch


WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
PREFIX = "base_model.model."

# Kind of a tensor by the suffix of its name, the longest suffix first.
_KINDS = (
    ("token_rows", r"\.token_adapter\.trainable_tokens_delta|\.trainable_tokens_delta"),
    ("own_weight", r"\.base_layer\.weight|\.token_adapter\.base_layer\.weight"),
    ("own_bias", r"\.base_layer\.bias"),
    ("a", r"\.lora_A\.weight"),
    ("b", r"\.lora_B\.weight"),
    ("b_bias", r"\.lora_B\.bias"),
    ("embedding_a", r"\.lora_embedding_A"),
    ("embedding_b", r"\.lora_embedding_B"),
    ("magnitude", r"\.lora_magnitude_vector(?:\.weight)?"),
)
_KIND = re.compile("(?:" + "|".join(f"(?P<{kind}>{end})" for kind, end in _KINDS) + ")$")
# PEFT may store a full tensor three times: as trained, as it was before, and under its own name, which PEFT reads.
_COPY = re.compile(r"\.(?:modules_to_save|original_module)(?=\.\w+$)")
_FORMATS = ("F32", "F16", "BF16", "F64")
_NO_TARGET = "mergegate applies every tensor of an adapter or none. Save the adapter again with PEFT"


@dataclass(frozen=True)
class AdaptedModule:
    """Tensors of an adapter for the module called ``name`` in memory, by kind (``a``, ``b``, ``magnitude``, …)."""

    name: str
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Args:
        directory: Directory of the adapter's files.
        config: Parsed configuration.
        modules: Modules with factors, trained token rows or magnitudes, by their name in the loaded model.
        full_tensors: Full tensors that replace tensors of the model, by their name in the loaded model.
        companions: Tokenizer and chat templates of the adapter, which replace those of the base.
        uncopied: Files and folders of ``directory`` that users may expect in a merge, but that mergegate does not copy.
    """

    directory: Path
    config: AdapterConfig
    modules: Mapping[str, AdaptedModule]
    full_tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    companions: Companions = field(default_factory=Companions)
    uncopied: tuple[str, ...] = ()

    @property
    def stored_tensors(self) -> tuple[StoredTensor, ...]:
        """All tensors of the adapter, in the order of its modules, with full tensors last."""
        module_tensors = (tensor for module in self.modules.values() for tensor in module.tensors.values())
        return (*module_tensors, *self.full_tensors.values())

    def has_zero_factors(self, read: ReadStored) -> bool:
        """Return whether each module with factors has one that is zero, so that the factors change nothing.

        The answer is False without factors, and for DoRA, whose magnitudes change weights even then.
        """

        def is_zero(tensor: StoredTensor) -> bool:
            stored = np.empty(tensor.nbytes, np.uint8)
            read(tensor, 0, stored)
            return not numbers(patterns(stored, tensor.dtype), tensor.dtype).any()

        kinds = ("b", "embedding_a", "a", "embedding_b")  # PEFT starts with zeros in one of the first two.
        modules = [module for module in self.modules.values() if set(kinds) & set(module.tensors)]
        return bool(modules) and all(
            "magnitude" not in tensors
            and (self.config.scale_of(name) == 0 or any(is_zero(tensors[kind]) for kind in kinds if kind in tensors))
            for name, tensors in ((module.name, module.tensors) for module in modules)
        )


def is_adapter(directory: Path) -> bool:
    return os.path.isfile(directory / CONFIG_FILE)  # noqa: PTH113  # Path.is_file raises if it may not be searched.


def adapter_files(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of an adapter's files ``names`` that determine its effect, including its tokenizer."""
    weights = WEIGHTS_FILE if WEIGHTS_FILE in names else PICKLED_FILE
    return (*(name for name in (CONFIG_FILE, weights) if name in names), *sorted(filter(is_own_text, names)))


def is_own_text(name: str) -> bool:
    """Return whether the file called ``name`` belongs to an adapter's tokenizer or chat template."""
    return companion_kind(name) in ("tokenizer", "chat template")


def open_adapter(
    directory: Path,
    remote_headers: Mapping[Path, Sequence[StoredTensor]] | None = None,
    names: Collection[str] | None = None,
) -> Adapter:
    """Read the configuration and the tensor headers of the adapter in ``directory``, but no weights.

    If a Hub repository is only partly downloaded, ``remote_headers`` supplies the headers of the missing weight files,
    by the path that each file will have, and ``names`` lists all files of the repository.

    Raises:
        InvalidInput: There is no adapter, files are damaged, the configuration is not supported, or a tensor has an
            unknown kind.
    """
    if not directory.is_dir():
        raise InvalidInput(str(directory), found="the directory does not exist", expected="a directory with an adapter")
    check_entries(directory, (CONFIG_FILE, WEIGHTS_FILE, PICKLED_FILE))
    if not is_adapter(directory):
        raise InvalidInput(
            str(directory),
            found=f"no {CONFIG_FILE}",
            expected="an adapter as PEFT saves it",
            remedy="write the reference as MODEL+ADAPTER: the adapter follows the +",
        )
    config, headers = read_adapter_config(directory), remote_headers or {}
    path = directory / WEIGHTS_FILE
    if path in headers:
        tensors = headers[path]
    elif path.exists():
        tensors = read_header(path, within=directory)
    elif (directory / PICKLED_FILE).exists():
        tensors = read_pickled(directory / PICKLED_FILE, within=directory)
    else:
        raise InvalidInput(str(directory), found="it contains no weights", expected=WEIGHTS_FILE)
    if not tensors:
        raise InvalidInput(str(path), found="it contains no tensors", expected="an adapter with weights")
    companions = list_companions(directory).only(is_own_text)
    adapter = _group_by_module(directory, config, tensors)
    return replace(adapter, companions=companions, uncopied=list_uncopied(directory, names))


def _group_by_module(directory: Path, config: AdapterConfig, tensors: Sequence[StoredTensor]) -> Adapter:
    modules: dict[str, dict[str, StoredTensor]] = {}
    full_tensors: dict[str, StoredTensor] = {}
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        if _COPY.search(tensor.name) and _COPY.sub("", tensor.name) in names:
            continue
        if not tensor.name.startswith(PREFIX):
            raise InvalidInput(
                tensor.full_name,
                found="a tensor name in another format",
                expected=f"names that start with {PREFIX}, as PEFT writes them",
                remedy=_NO_TARGET,
            )
        if tensor.dtype.code not in _FORMATS:
            raise InvalidInput(tensor.full_name, found=tensor.dtype.code, expected=", ".join(_FORMATS))
        if not tensor.numel:
            raise InvalidInput(
                tensor.full_name,
                found="a tensor without elements",
                expected="weights",
                remedy="gather the weights before you save the adapter (DeepSpeed, FSDP)",
            )
        name = tensor.name.removeprefix(PREFIX)
        match = _KIND.search(name)
        if match is None:
            if ".lora_" in name:
                raise InvalidInput(
                    tensor.full_name, found="an unknown kind of tensor", expected="tensors of LoRA", remedy=_NO_TARGET
                )
            full_tensors[name] = tensor
            continue
        kind = str(match.lastgroup)
        by_kind = modules.setdefault(name[: match.start()], {})
        if kind in by_kind:
            raise InvalidInput(
                tensor.full_name,
                found=f"it has the same role as {by_kind[kind].name}",
                expected="one tensor for each role",
            )
        by_kind[kind] = tensor
    return Adapter(
        directory, config, {name: AdaptedModule(name, by_kind) for name, by_kind in modules.items()}, full_tensors
    )


# PEFT's task for each class that loads a base model. Classifiers have none, because PEFT would require that the adapter
# contains a new head.
_TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModel": "FEATURE_EXTRACTION",
    "SentenceTransformer": "FEATURE_EXTRACTION",
}


def task_type(base: Checkpoint) -> str | None:
    """Return the ``task_type`` of an adapter of ``base``, or None if PEFT needs none for this kind of model."""
    return _TASKS.get(kind_of(base).loader)


@dataclass(frozen=True)
class NewAdapter:
    """An adapter to write. The product of its factors needs no scale, so alpha equals the rank.

    Args:
        base: Name or path of the base model (``base_model_name_or_path``).
        factors: Factors ``A [rank, in]`` and ``B [out, rank]`` of linear layers by module.
        embeddings: Factors ``A [rank, rows]`` and ``B [width, rank]`` of embeddings by module.
        biases: Full biases of modules with factors, by module.
        full_tensors: Full tensors of modules without factors, by module and last part of the name.
        transposed: Whether the adapted weights are stored as ``[in, out]`` (``fan_in_fan_out``).
        task: ``task_type``, by which PEFT selects its class. None: the class for models of any task.
    """

    base: str
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    embeddings: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    full_tensors: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    transposed: bool = False
    task: str | None = "CAUSAL_LM"

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for module, (a, b) in self.factors.items():
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        for module, (a, b) in self.embeddings.items():
            tensors |= {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
        tensors |= {f"{module}.base_layer.bias": bias for module, bias in self.biases.items()}
        for module, by_leaf in self.full_tensors.items():
            tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in by_leaf.items()}
        return {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in sorted(tensors.items())}

    def configuration(self) -> dict[str, Any]:
        ranks = {module: len(a) for module, (a, _) in sorted({**self.factors, **self.embeddings}.items())}
        rank = max(ranks.values(), default=1)
        # PEFT interprets a pattern as a regular expression that matches complete trailing parts of the module's name.
        smaller = {re.escape(module): module_rank for module, module_rank in ranks.items() if module_rank != rank}
        return {
            "peft_type": "LORA",
            "task_type": self.task,
            "base_model_name_or_path": self.base,
            "r": rank,
            "lora_alpha": rank,
            "rank_pattern": smaller,
            "alpha_pattern": smaller,
            "target_modules": list(ranks),
            "modules_to_save": sorted(self.full_tensors) or None,
            "bias": "lora_only" if self.biases else "none",
            "fan_in_fan_out": self.transposed,
            "init_lora_weights": True,
            "inference_mode": True,
            "lora_dropout": 0.0,
            "use_rslora": False,
            "use_dora": False,
        }


def write_adapter(adapter: NewAdapter, out: Path) -> None:
    """Write ``adapter`` into the directory ``out``, with its configuration last."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    tensors = adapter.tensors()
    header = [
        (name, BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")].code, tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    ]
    with (out / WEIGHTS_FILE).open("wb") as file:
        file.write(render_header(header, {"format": "pt"}))
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    (out / CONFIG_FILE).write_text(json.dumps(adapter.configuration(), indent=1, sort_keys=True) + "\n")
