"""Merges matrices with FusionBench's own functions. Run it with the interpreter of FusionBench's environment.

    python run_fusionbench.py INPUTS.safetensors RESULTS.safetensors

INPUTS has ``{matrix}/base``, ``{matrix}/model{i}``, ``{matrix}/moments{i}`` and ``{matrix}/importance{i}``. RESULTS
gets ``{method}/{matrix}``, the merged matrices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any


def main(inputs: str, results: str) -> None:
    """Merge each matrix with each method."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    given = load_file(inputs)
    made = {}
    for matrix in dict.fromkeys(name.partition("/")[0] for name in given):
        own = {name.partition("/")[2]: tensor for name, tensor in given.items() if name.startswith(f"{matrix}/")}
        models = [own[f"model{i}"] for i in range(sum(name.startswith("model") for name in own))]
        moments = [own[f"moments{i}"] for i in range(len(models))]
        importance = [own[f"importance{i}"] for i in range(len(models))]
        for method, merge in _methods(own["base"], models, moments, importance):
            made[f"{method}/{matrix}"] = merge().detach().contiguous()
    save_file(made, results)


def _methods(
    base: Any, models: list[Any], moments: list[Any], importance: list[Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch
    from fusion_bench.method.fisher_merging.fisher_merging import merging_with_fisher_weights
    from fusion_bench.method.knots.knots_utils import subspace_alignment
    from fusion_bench.method.regmean.regmean import merging_with_regmean_weights
    from fusion_bench.method.singular_value_calibration import utils as calibration
    from fusion_bench.method.tall_mask.utils import generate_task_masks
    from fusion_bench.method.task_singular_vector.utils.TSVM_utils import compute_and_sum_svd_mem_reduction
    from fusion_bench.method.wudi.wudi import wudi_merging

    deltas = [model - base for model in models]
    named = [{"layer.weight": delta} for delta in deltas]

    def regmean(keep: float) -> Any:
        of = {"layer.weight": models}
        return merging_with_regmean_weights(of, [{"layer": one} for one in moments], keep)["layer.weight"]

    def fisher(**how: Any) -> Any:
        found = merging_with_fisher_weights(
            {"layer.weight": models}, [{"layer.weight": one} for one in importance], torch.ones(len(models)), **how
        )
        return found["layer.weight"]

    def svc(alpha: float, merged: Any = None) -> Any:
        merged = base + sum(deltas) if merged is None else merged
        return calibration.subspace_consistency_spectral_calibration(base, models, merged, alpha, torch.device("cpu"))

    def consensus() -> Any:
        flat, total = torch.stack([model.flatten() for model in models]), sum(deltas)
        masks = generate_task_masks(
            torch.stack([delta.flatten() for delta in deltas]), flat, base.flatten(), tall_mask_lambda=0.4
        )
        return base + torch.where(masks.sum(0).reshape(base.shape) >= 2, total, torch.zeros_like(total))

    def knots_mean() -> Any:
        left, values, right = subspace_alignment(deltas, eps=1e-9)
        return base + left @ torch.diag(values) @ (sum(right) / len(right))

    yield "regmean .9", lambda: regmean(0.9)
    yield "regmean .5", lambda: regmean(0.5)
    yield "fisher", lambda: fisher(normalize_fisher_weight=False, minimal_fisher_weight=0.0)
    yield "fisher as usual", lambda: fisher()
    yield "svc 1", lambda: svc(1.0)
    yield "svc .5", lambda: svc(0.5)
    yield "svc of a median", lambda: svc(0.5, base + torch.stack(deltas).median(0).values)
    yield "tsv_m", lambda: base + compute_and_sum_svd_mem_reduction(named)["layer.weight"]
    yield "wudi", lambda: base + wudi_merging(named, accelerator="cpu")["layer.weight"]
    yield "consensus_ta", consensus
    yield "knots, mean", knots_mean


if __name__ == "__main__":
    main(*sys.argv[1:])
