"""The same recipe gives the same weights as mergekit 0.1.5, up to rounding or, for random methods, in distribution."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from peer_family import require_peer, run_peer, write_family
from peer_recipes import DENSITY, DETERMINISTIC, EXAMPLES, NEAR, RANDOM, random_of_one, random_of_three
from safetensors.torch import load_file
from samples import sampled_rows

from mergegate.merge_core import EngineSettings, load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.checkpoint import read_header

pytestmark = pytest.mark.peer

SEEDS = range(24)

# Family → (distance of the fine-tunes from the base, dtype).
FAMILIES = {
    "far": (0.03, torch.float32),
    "near": (0.0002, torch.float32),
    "exact": (0.03, torch.float64),
    "exact-near": (0.0002, torch.float64),
}
# One model without a stored output head among models that store one, and a family in which no model stores one.
TIED = {"one-tied": ("two",), "all-tied": ("base", "one", "two", "three")}
CASES = [(family, name) for family in FAMILIES for name in (NEAR if "near" in family else DETERMINISTIC)]
CASES += [(family, name) for family in TIED for name in ("linear weighted", "task_arithmetic", "ties", "linear cut")]
RANDOM_CASES = {"one": random_of_one, "three": random_of_three}

Tensors = Mapping[str, np.ndarray]


class Peer:
    """mergekit's results for the recipes of some families, and of the random methods if they are tested."""

    def __init__(self, root: Path, families: Collection[str], has_random: bool) -> None:
        self.root = root
        self.jobs: list[dict[str, object]] = []
        for family, (spread, dtype) in FAMILIES.items():
            write_family(root / family, spread=spread, dtype=dtype, ties=spread < 0.001)
        for family, tied in TIED.items():
            write_family(root / family, spread=0.03, dtype=torch.float32, tied=tied)
        for family, name in CASES:
            if family in families:
                self._add(family, name, DETERMINISTIC[name])
        for method in RANDOM if has_random else ():
            for models, recipe in RANDOM_CASES.items():
                for seed in SEEDS:
                    self._add("far", f"{method} of {models}", recipe(method), seed=seed)
        for name, (recipe, final) in EXAMPLES.items():
            self._add("far", name, recipe, final=final)
        (root / "jobs.json").write_text(json.dumps(self.jobs))
        run_peer("peer", "run_mergekit.py", "jobs.json", "results.json", directory=root)
        self.errors: dict[str, str | None] = json.loads((root / "results.json").read_text())

    def _add(self, family: str, name: str, recipe: str, *, seed: int = 0, final: str | None = None) -> None:
        out = self._out(family, name, seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        # mergekit caches its loaders by name for the whole process, so a name must always mean the same checkpoint.
        self._recipe(family, name).write_text(
            re.sub(r"(model: )(base|one|two|three)\b", rf"\1{family}/\2", recipe), encoding="utf-8"
        )
        job = {"recipe": str(self._recipe(family, name)), "out": str(out), "seed": seed}
        self.jobs.append({**job, "multi": "\n---\n" in recipe, "final": final})

    def _out(self, family: str, name: str, seed: int) -> Path:
        return self.root / "peer" / family / f"{name.replace(' ', '-')}-{seed}"

    def _recipe(self, family: str, name: str) -> Path:
        return self.root / "peer" / family / f"{name.replace(' ', '-')}.yaml"

    def theirs(self, family: str, name: str, seed: int = 0) -> Tensors:
        """Return mergekit's output for a recipe."""
        out = self._out(family, name, seed)
        assert self.errors[str(out)] is None, f"mergekit: {self.errors[str(out)]}"
        return load(out)

    def ours(
        self, family: str, name: str, out: Path, *, seed: int = 0, kernels: Literal["torch", "fused"] = "torch"
    ) -> Tensors:
        """Return mergegate's output for the same recipe file."""
        recipe = load_recipe(self._recipe(family, name))
        checkpoints = {str(ref): open_checkpoint(self.root / ref.path) for ref in recipe.references()}
        settings = EngineSettings(threads=2, kernels=kernels)
        merge_weights(plan_merge(recipe, checkpoints), out, seed=seed, device="cpu", settings=settings)
        return load(out)

    def both(self, name: str, out: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return base ``[elements]`` and mergekit's and mergegate's random merges ``[seeds, elements]``."""
        theirs = np.stack([flat(self.theirs("far", name, seed)) for seed in SEEDS])
        ours = np.stack([flat(self.ours("far", name, out / str(seed), seed=seed)) for seed in SEEDS])
        return flat(load(self.root / "far" / "base")), theirs, ours


@pytest.fixture(scope="session")
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Results of mergekit for the selected tests."""
    require_peer("peer")
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    families = {str(row.get("family", "far")) for row in parameters}
    return Peer(tmp_path_factory.mktemp("mergekit"), families, any("method" in row for row in parameters))


def load(directory: Path) -> Tensors:
    """Return all tensors of a checkpoint in float64."""
    files = (load_file(file) for file in sorted(directory.glob("*.safetensors")))
    return {name: tensor.double().numpy() for tensors in files for name, tensor in tensors.items()}


def flat(tensors: Tensors) -> np.ndarray:
    """Return all elements in the order of the tensor names."""
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def formats(directory: Path) -> dict[str, str]:
    """Return the stored dtype of each tensor."""
    tensors = (tensor for file in directory.glob("*.safetensors") for tensor in read_header(file))
    return {tensor.name: tensor.dtype.code for tensor in tensors}


@pytest.mark.parametrize(
    ("family", "name"),
    sampled_rows(CASES, [case for case in CASES if case[0] in ("exact", *TIED)], pytest.mark.proof),
    ids=[f"{family}: {name}" for family, name in CASES],
)
def test_the_recipe_means_the_same(peer: Peer, family: str, name: str, tmp_path: Path) -> None:
    compare(peer, family, name, peer.ours(family, name, tmp_path / "out"))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_recipe_means_the_same_to_fused_kernels(peer: Peer, name: str, tmp_path: Path) -> None:
    compare(peer, "far", name, peer.ours("far", name, tmp_path / "out", kernels="fused"))


def compare(peer: Peer, family: str, name: str, ours: Tensors) -> None:
    # Largest difference per tensor, relative to the tensor's largest magnitude. In float32, sums depend on their order.
    # In float64, only a wrong formula can differ, except that mergekit keeps ramplus_tl's factors in float32.
    limit = 1e-6 if not family.startswith("exact") or name.startswith("ramplus_tl") else 1e-12
    theirs = peer.theirs(family, name)
    assert ours.keys() == theirs.keys()
    found = {name: np.abs(ours[name] - theirs[name]).max() / max(np.abs(theirs[name]).max(), 1e-30) for name in theirs}
    wrong = {tensor: f"{size:.1e}" for tensor, size in found.items() if not size <= limit}
    assert not wrong, f"{len(wrong)} of {len(found)} tensors"


@pytest.mark.proof
@pytest.mark.parametrize("method", RANDOM)
def test_random_masks_keep_as_much_and_the_same_norm(peer: Peer, method: str, tmp_path: Path) -> None:
    base, *merged = peer.both(f"{method} of one", tmp_path)
    tuned = load(peer.root / "far" / "one")
    delta = flat(tuned) - base
    ends = np.cumsum([tensor.size for _, tensor in sorted(tuned.items())])[:-1]
    for results in merged:
        kept = results != base
        deviation = (DENSITY * (1 - DENSITY) / kept.size) ** 0.5
        assert abs(kept.mean() - DENSITY) < 5 * deviation
        for change in results - base:
            whole = [np.abs(part).sum() for part in np.split(delta, ends)]
            left = [np.abs(part).sum() for part in np.split(change, ends)]
            # A mask sometimes drops all 16 elements of a tensor. In the others, rescaling restores the full sum.
            assert sum(part == 0 for part in left) <= 2
            for part, expected in zip(left, whole, strict=True):
                assert part in (0, pytest.approx(expected, rel=1e-5))


@pytest.mark.proof
@pytest.mark.parametrize("method", ["della", "della_linear"])
def test_large_elements_of_a_row_are_kept_as_much_more_often(peer: Peer, method: str, tmp_path: Path) -> None:
    base, theirs, ours = peer.both(f"{method} of one", tmp_path)
    tuned = load(peer.root / "far" / "one")
    original = load(peer.root / "far" / "base")
    # Rank of every element in its row, from 0 to 1.
    ranks = []
    for name in sorted(tuned):
        rows = np.abs(tuned[name] - original[name]).reshape(-1, tuned[name].shape[-1])
        ranks.append((rows.argsort(axis=1).argsort(axis=1) / (rows.shape[1] - 1)).ravel())
    rank = np.concatenate(ranks)
    for low in (0.0, 0.25, 0.5, 0.75):
        part = (rank >= low) & (rank <= low + 0.25)
        expected = (DENSITY - 0.08 + 2 * 0.08 * rank[part]).mean()
        for results in (theirs, ours):
            share = (results[:, part] != base[part]).mean()
            assert abs(share - expected) < 5 * (0.25 / (part.sum() * len(SEEDS))) ** 0.5


@pytest.mark.proof
@pytest.mark.parametrize("models", RANDOM_CASES)
@pytest.mark.parametrize("method", RANDOM)
def test_random_merges_have_the_same_expectation(peer: Peer, method: str, models: str, tmp_path: Path) -> None:
    base, theirs, ours = peer.both(f"{method} of {models}", tmp_path)
    for of_theirs, of_ours in ((theirs - base, ours - base), (np.abs(theirs - base), np.abs(ours - base))):
        # With two samples per element, the mean of t squared over all elements follows from Student's distribution.
        variance = (of_theirs.var(axis=0, ddof=1) + of_ours.var(axis=0, ddof=1)) / len(SEEDS)
        varies = variance > 0
        t = (of_ours.mean(axis=0) - of_theirs.mean(axis=0))[varies] / np.sqrt(variance[varies])
        freedom = 2 * len(SEEDS) - 2
        assert varies.mean() > 0.9
        assert abs((t**2).mean() - freedom / (freedom - 2)) < 0.15
        assert abs(t.mean()) < 0.1


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_mergekit_shows_as_examples_runs_unchanged(peer: Peer, name: str, tmp_path: Path) -> None:
    theirs, ours = peer.theirs("far", name), peer.ours("far", name, tmp_path / "out")
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: tensor.shape for key, tensor in theirs.items()}
    assert formats(tmp_path / "out") == formats(peer._out("far", name, 0))
    # mergekit rounds the inputs to half precision and computes in it, which moves some elements across a threshold.
    near = [np.abs(ours[key] - theirs[key]) <= 0.01 * np.abs(theirs[key]).max() for key in theirs]
    assert np.concatenate([part.ravel() for part in near]).mean() > 0.9
