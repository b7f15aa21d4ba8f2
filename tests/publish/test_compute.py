"""The estimated computation is an upper bound of counted operations, for merge methods and models that read text."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sampled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from mergegate.merge_core import open_checkpoint, plan_merge
from mergegate.merge_core.engine import EngineSettings, merge_tensors
from mergegate.merge_core.methods import merge_methods
from mergegate.tasks.release.publish.documents.facts import Modification

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "merge_core"))
from family import read_recipe, recipe_of, save_checkpoint

sys.path.pop(0)

# Operations of torch that compute nothing.
VIEWS = {"_unsafe_view", "as_strided", "detach", "expand", "permute", "select", "slice", "squeeze", "t", "transpose"}
VIEWS |= {
    "alias", "empty", "empty_like", "empty_strided", "new_empty", "reshape", "split", "unbind", "unsqueeze", "view",
}  # fmt: skip


class ElementCounter(TorchDispatchMode):
    """Counts one operation per element of the largest operand, also for copies, and those of products and sorts."""

    operations = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tensors = [*operands, *(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))]
        if name in VIEWS or not tensors:
            return result
        count = float(max(tensor.numel() for tensor in tensors))
        last = max((tensor.shape[-1] for tensor in tensors if tensor.dim()), default=1)
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            count = 2.0 * operands[-2].numel() * operands[-1].shape[-1]
        elif name.startswith("linalg_eigh"):
            count *= 9.0 * last
        elif "cholesky" in name or "solve" in name:
            count *= 2.0 * last
        elif name in ("argsort", "kthvalue", "median", "sort", "topk"):
            count *= max(1.0, math.log2(last))
        self.operations += count
        return result


@pytest.fixture(scope="module")
def four_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, generator = tmp_path_factory.mktemp("models"), torch.Generator().manual_seed(0)
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
    base = {name: torch.randn(48, 64, generator=generator) for name in names}
    for model in ("base", "a", "b", "c"):
        distance = 0.0 if model == "base" else 0.1
        changed = {name: value + distance * torch.randn(48, 64, generator=generator) for name, value in base.items()}
        tensors = {name: value.bfloat16() for name, value in changed.items()}
        save_checkpoint(root / model, tensors, config={"num_hidden_layers": 1})
    return root


@pytest.mark.parametrize("method", sampled(sorted(merge_methods()), ["linear", "model_stock", "della"]))
def test_no_method_takes_more_operations_than_estimated(four_models: Path, method: str) -> None:
    recipe = read_recipe(recipe_of(method), four_models)
    plan = plan_merge(recipe, {str(ref): open_checkpoint(four_models / ref.path) for ref in recipe.references()})
    with ElementCounter() as counter:
        for _ in merge_tensors(plan, settings=EngineSettings(kernels="torch")):
            pass
    bound = Modification.of_network(plan.config, plan.parameters, len(recipe.own_references())).flop
    assert 0 < counter.operations <= bound


def test_reading_a_text_with_derivatives_takes_at_most_the_estimated_operations() -> None:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, attn_implementation="eager")
    network = AutoModelForCausalLM.from_config(config)
    parameters = sum(weight.numel() for weight in network.parameters())
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros((1, 64), dtype=torch.long)).logits.sum().backward()
    bound = Modification.of_network(config.to_dict(), parameters, models=0, tokens=64)
    assert 0 < counter.get_total_flops() <= bound.flop
    assert bound.flop < Modification.of_network({}, parameters, models=0, tokens=64).flop  # unknown sizes
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[0-9][0-9,]*", bound.formula)]
    size, per_width, models, width, per_token, layers, read = numbers
    assert size * (per_width * models * width + per_token * layers * read) == bound.flop
