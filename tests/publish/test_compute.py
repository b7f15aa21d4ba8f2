"""The estimated computation is an upper bound of counted operations, for merge methods and models that read text."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from release_samples import publishable
from samples import sampled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from mergegate.merge_core import open_checkpoint, plan_merge
from mergegate.merge_core.architecture.model_kinds import TEXT_GENERATOR, ModelKind
from mergegate.merge_core.engine import EngineSettings, merge_tensors
from mergegate.merge_core.files import HashMemo, JournalLocation
from mergegate.merge_core.methods import merge_methods
from mergegate.tasks.checkpoints import Model, unload_models
from mergegate.tasks.evaluation import Scoring
from mergegate.tasks.evaluation.document_order import DocumentRange
from mergegate.tasks.evaluation.harness import ScoringJob, score_documents
from mergegate.tasks.evaluation.task_definition import pin_task
from mergegate.tasks.perplexity import PerplexitySettings, WindowSettings, pin_documents
from mergegate.tasks.perplexity.measurement import measure
from mergegate.tasks.publish import compute
from mergegate.tasks.publish.public_names import PublicNames
from mergegate.tasks.publish.release_compute import merge_compute

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "merge_core"))
from family import read_recipe, recipe_of, save_checkpoint

sys.path.pop(0)

DEMO = Path(__file__).resolve().parents[2] / "profiles" / "demo"
BASE = compute.NetworkDimensions(parameters=280_416, layers=3, attention_width=96, context=128)
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


def require_upper_bound(text: str, root: Path, models: Path) -> None:
    """Assert that merging takes at most the estimated number of operations."""
    recipe = read_recipe(text, root)
    plan = plan_merge(recipe, {str(ref): open_checkpoint(models / ref.path) for ref in recipe.references()})
    with ElementCounter() as counter:
        for _ in merge_tensors(plan, settings=EngineSettings(kernels="torch")):
            pass
    (part,) = compute.plan_parts(plan)
    assert 0 < counter.operations <= part.flop


@pytest.mark.parametrize("method", sampled(sorted(merge_methods()), ["linear", "model_stock", "della"]))
def test_no_method_takes_more_operations_than_estimated(four_models: Path, method: str) -> None:
    require_upper_bound(recipe_of(method), four_models, four_models)


@pytest.mark.parametrize("noise", sampled(["0", "0.001"], ["0.001"]))
def test_no_mixture_takes_more_operations_than_estimated(noise: str) -> None:
    text = (DEMO / "recipes" / "upcycled.yaml").read_text().replace("gate_mode: hidden", "gate_mode: random")
    text = text.replace("../models/", "").replace("noise_scale: 0.001", f"noise_scale: {noise}")
    require_upper_bound(text, DEMO, DEMO / "models")


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_a_network_takes_at_most_the_estimated_operations_and_at_least_half(tokens: int) -> None:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, attn_implementation="eager")
    network = AutoModelForCausalLM.from_config(config)
    size = compute.NetworkDimensions.from_config(
        config.to_dict(), sum(weight.numel() for weight in network.parameters())
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.zeros((1, tokens), dtype=torch.long))
    assert counter.get_total_flops() <= size.flop(tokens, tokens) <= 2 * counter.get_total_flops()


@pytest.fixture
def base_model() -> Iterator[Model]:
    yield Model(name="base", digest="0" * 64, directory=DEMO / "models" / "base", files=())
    unload_models()


@pytest.mark.story
def test_the_perplexity_of_the_demo_takes_at_most_the_estimated_operations(base_model: Model, tmp_path: Path) -> None:
    settings = PerplexitySettings(documents=DEMO / "data" / "held-out.jsonl")
    text = pin_documents(settings, tmp_path, HashMemo(tmp_path / "hashes.db"))
    windows = WindowSettings(documents=64, dtype="float32")
    journal = JournalLocation(tmp_path / "journal", "key")
    with FlopCounterMode(display=False) as counter:
        result = measure(base_model, text, windows, "cpu", journal, lambda done, total: None)
    tokens = sum(row.tokens for row in result.rows)
    estimate = compute.perplexity_part("base", BASE, tokens, result.window).flop
    assert counter.get_total_flops() <= estimate <= 10 * counter.get_total_flops()


@pytest.mark.story
def test_a_task_of_the_demo_takes_at_most_the_estimated_operations(base_model: Model, tmp_path: Path) -> None:
    task = pin_task("copy.yaml", DEMO / "tasks", HashMemo(tmp_path / "hashes.db"))
    job = ScoringJob(base_model, task, Scoring(dtype="float32"), DocumentRange(first=0, last=40), "cpu")
    with FlopCounterMode(display=False) as counter:
        assert len(score_documents(job, lambda done, total: None)) == 40
    estimate = compute.task_part("base", "copy", BASE, 40, answers=None, max_length=None).flop
    assert 0 < counter.get_total_flops() <= estimate


def test_an_estimate_adds_up_its_parts() -> None:
    parts = (
        compute.ComputePart("merge", "ties", 2e9, 4e6),
        compute.ComputePart("evaluation", "copy: merge", 3e9),
        compute.ComputePart("evaluation", "copy: base", 1e9),
    )
    estimate = compute.estimate_compute(parts, "cpu", ["A note."])
    assert (estimate.merge_flop, estimate.evaluation_flop) == (2e9, 4e9)
    # 6 · 10^9 operations at 10^9 per joule, 4 MB at 10^-6 joule per byte, three parts at 60 kJ
    assert estimate.energy_kwh == pytest.approx((6 + 4 + 180_000) / 3.6e6)
    assert estimate.assumptions[-1] == "A note."
    assert compute.estimate_compute(parts[:1], "cpu").evaluation_flop is None
    assert compute.estimate_compute(parts, "cuda").energy_kwh < estimate.energy_kwh


def test_larger_inputs_never_need_fewer_operations() -> None:
    larger = compute.NetworkDimensions(parameters=300_000, layers=4, attention_width=128, context=256)
    assert compute.perplexity_part("m", BASE, 100, 32).flop < compute.perplexity_part("m", larger, 100, 32).flop
    assert compute.calibration_part("m", BASE, 100).flop < compute.calibration_part("m", BASE, 100, operations=6.0).flop
    assert compute.adapter_part([(8, 8)], 2, "ties").flop < compute.adapter_part([(8, 9)], 2, "ties").flop
    few = compute.task_part("m", "t", BASE, 10, answers=10, max_length=None)
    assert few.flop < compute.task_part("m", "t", BASE, 10, answers=12, max_length=None).flop
    assert few.flop > compute.task_part("m", "t", BASE, 10, answers=10, max_length=64).flop


def test_unknown_sizes_are_replaced_by_large_ones() -> None:
    unknown = compute.NetworkDimensions.from_config({}, 1_000)
    known = compute.NetworkDimensions.from_config(
        {"hidden_size": 4096, "num_hidden_layers": 32, "head_dim": True}, 1_000
    )
    assert unknown.flop(1) > known.flop(1) > 0


def test_only_the_sheet_of_a_model_that_ranks_texts_says_which_numbers_are_no_bounds(tmp_path: Path) -> None:
    sample = publishable(tmp_path)
    ranking = ModelKind("embedding model", "sentence-similarity", "SentenceTransformer", task_forms=("retrieval",))
    notes = {}
    for kind in (TEXT_GENERATOR, ranking):
        content = sample.content.model_copy(update={"kind": kind})
        estimate = merge_compute(content, sample.pinned, sample.numerics, sample.merged, PublicNames({}))
        notes[kind] = set(estimate.assumptions)
    (note,) = notes[ranking] - notes[TEXT_GENERATOR]
    assert notes[TEXT_GENERATOR] < notes[ranking]
    assert "retrieval" in note
    assert "not upper bounds" in note
