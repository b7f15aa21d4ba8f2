"""Quantize tiny checkpoints of real architectures by hand, with torch and without llm-compressor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mergegate.tasks.quality.variants.quantized_tensors import SCHEMES, Scheme, expected_configuration
from tests.tiny_models import LETTERS, make_model

Family = Literal["llama", "qwen2", "mixtral"]
Tensors = dict[str, torch.Tensor]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def make_merge(directory: Path, family: Family) -> Path:
    """Save a random model: Llama with a head of its own, Qwen2 in four shards with a tied head, or Mixtral."""
    make_model(directory)
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        **{"vocab_size": len(LETTERS) + 3, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
        **{"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64},
        **{"initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": family == "qwen2"},
        **({"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}),
    }
    network: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    for file in directory.glob("*.safetensors"):
        file.unlink()
    network.to(torch.bfloat16).save_pretrained(directory, max_shard_size="200KB" if family == "qwen2" else "5GB")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def is_matrix(name: str) -> bool:
    """Return whether a scheme quantizes the tensor of these families called ``name``."""
    return re.search(r"((q|k|v|o|gate|up|down)_proj|\.experts\..*w[123])\.weight$", name) is not None


def quantize_by_hand(merge: Path, directory: Path, scheme_name: str) -> Path:
    """Round the matrices of ``merge`` to the nearest number of a scheme, and save the result."""
    scheme = SCHEMES[scheme_name]
    shutil.copytree(merge, directory)
    for file in directory.glob("*.safetensors"):
        stored: Tensors = {}
        for name, tensor in load_file(file).items():
            if is_matrix(name):
                module = name.removesuffix("weight")
                stored |= {module + part: value for part, value in round_matrix(tensor, scheme).items()}
            else:
                stored[name] = tensor
        save_file(stored, file, {"format": "pt"})
    rewrite_index(directory)
    settings = expected_configuration(scheme)
    group = settings["config_groups"].pop("group")
    layout = "float-quantized" if scheme.kind == "float" else "pack-quantized" if scheme.packed else "int-quantized"
    settings |= {"config_groups": {"group_0": {**group, "format": layout}}, "format": layout, "ignore": ["lm_head"]}
    change_config(directory, quantization_config=settings)
    return directory


def round_matrix(matrix: torch.Tensor, scheme: Scheme) -> Tensors:
    """Return the tensors that store a matrix in ``scheme``."""
    rows, columns = matrix.shape
    high, wide = scheme.rows or rows, scheme.columns or columns
    blocks = matrix.double().reshape(rows // high, high, columns // wide, wide)
    largest = 448.0 if scheme.kind == "float" else 2.0 ** (scheme.bits - 1) - 1
    scales = (blocks.abs().amax(dim=(1, 3)) / largest).to(torch.bfloat16)
    quotients = (blocks / scales.double()[:, None, :, None]).reshape(rows, columns)
    stored: Tensors = {"weight_scale": scales.reshape(1) if scheme.rows == 0 else scales}
    if scheme.measures_inputs:
        stored["input_scale"] = torch.tensor([0.01], dtype=torch.bfloat16)
    if scheme.kind == "float":
        return {**stored, "weight": quotients.clamp(-448, 448).to(torch.float8_e4m3fn)}
    integers = quotients.round().clamp(-largest - 1, largest).to(torch.int64)
    if not scheme.packed:
        return {**stored, "weight": integers.to(torch.int8)}
    per_word = 32 // scheme.bits
    words = (integers + 2 ** (scheme.bits - 1)).reshape(rows, columns // per_word, per_word)
    words = (words << (scheme.bits * torch.arange(per_word))).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {**stored, "weight_packed": words, "weight_shape": torch.tensor([rows, columns])}


def dequantize_by_hand(directory: Path, merge: Path, scheme: Scheme) -> Tensors:
    """Return the float64 matrices that a checkpoint stores, by name, without any code of the product."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    matrices: Tensors = {}
    for name in (name for file in sorted(merge.glob("*.safetensors")) for name in load_file(file)):
        if not is_matrix(name):
            matrices[name] = tensors[name].double()
            continue
        module = name.removesuffix("weight")
        scales = tensors[f"{module}weight_scale"].double()
        if scheme.packed:
            rows, columns = tensors[f"{module}weight_shape"].tolist()
            words = tensors[f"{module}weight_packed"].to(torch.int64) & 0xFFFFFFFF
            parts = (words[..., None] >> (scheme.bits * torch.arange(32 // scheme.bits))) & (2**scheme.bits - 1)
            values = parts.reshape(rows, -1)[:, :columns].double() - 2 ** (scheme.bits - 1)
        else:
            values = tensors[f"{module}weight"].double()
        rows, columns = values.shape
        if scheme.rows:
            scales = scales.repeat_interleave(scheme.rows, 0)
            scales = scales.repeat_interleave(columns // scales.shape[1], 1)
        matrices[name] = values * scales
    return matrices


def change_tensors(directory: Path, change: Any) -> None:
    """Let ``change`` modify the tensors of every weight file, as a mapping by name."""
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
    rewrite_index(directory)


def rewrite_index(directory: Path) -> None:
    """Write the index again, if there is one."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = {name: file.name for file in sorted(directory.glob("*.safetensors")) for name in load_file(file)}
        index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def change_config(directory: Path, **changes: object) -> None:
    """Set fields of config.json."""
    path = directory / "config.json"
    config: Mapping[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))
