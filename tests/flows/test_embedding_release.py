"""Release a merge of embedding models, and refuse merges that lost a part of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_project import PROFILES, Project, expect, make_project
from safetensors.torch import load_file, save_file
from samples import sampled
from typer.testing import Result

pytestmark = pytest.mark.story

Released = tuple[Project, Path]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Released:
    """Return a project with the release of ``demo-embeddings.yaml``, and the directory of the release."""
    project = make_project(tmp_path_factory.mktemp("embeddings"))
    expect(project.mergegate("run", "profiles/demo-embeddings.yaml"), 0)
    return project, project.root / "releases" / "demo-embeddings" / "latest"


def test_the_demo_of_embedding_models_is_released_with_its_modules(released: Released) -> None:
    files = ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/model.safetensors")
    assert [file for file in files if not (released[1] / file).is_file()] == []


def test_the_release_embeds_like_a_merge_in_memory(released: Released) -> None:
    """Task arithmetic adds 0.7 of what each parent learned, also to the dense module."""
    from sentence_transformers import SentenceTransformer

    def load(directory: Path) -> SentenceTransformer:
        return SentenceTransformer(str(directory), device="cpu", model_kwargs={"dtype": "float32"})

    parents = [load(PROFILES / "demo" / "models" / f"embed-{name}") for name in ("base", "garden", "harbor")]
    base, garden, harbor = (parent.state_dict() for parent in parents)
    merge = {
        name: tensor + 0.7 * (garden[name] - tensor) + 0.7 * (harbor[name] - tensor) for name, tensor in base.items()
    }
    parents[0].load_state_dict(merge)
    lines = (PROFILES / "demo" / "data" / "garden.jsonl").read_text().splitlines()[:50]
    queries = [json.loads(line)["query"] for line in lines]
    cosines = (load(released[1]).encode_query(queries) * parents[0].encode_query(queries)).sum(axis=1)
    assert cosines.min() > 0.999  # The release is rounded to bfloat16.


def edit_json(file: Path, change: Callable[[Any], object]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def pool_by(**modes: bool) -> Callable[[Path], None]:
    """Return a change of the pooling. A mean is what sentence-transformers uses without a pooling module."""

    def change(settings: Any) -> object:
        dimension = settings.get("embedding_dimension") or settings.get("word_embedding_dimension")
        return {"word_embedding_dimension": dimension, **modes}

    return lambda model: edit_json(model / "1_Pooling" / "config.json", change)


def lose_prompts(model: Path) -> None:
    prompts = {"prompts": {"query": "", "document": ""}}
    edit_json(model / "config_sentence_transformers.json", lambda settings: {**settings, **prompts})


def lose_module(number: int) -> Callable[[Path], None]:
    return lambda model: edit_json(model / "modules.json", lambda all_: [it for it in all_ if it["idx"] != number])


def scale_dimensions(model: Path) -> None:
    """Multiply the dimensions before the dense module by powers of two, and divide its weights by them.

    The embeddings stay the same, but now only the dense module balances the dimensions.
    """
    tensors, dense = load_file(model / "model.safetensors"), load_file(model / "2_Dense" / "model.safetensors")
    factors = 2.0 ** (torch.arange(dense["linear.weight"].shape[1]) % 13 - 6)
    for name in ("weight", "bias"):
        tensors[f"encoder.layer.1.output.LayerNorm.{name}"] *= factors
    dense["linear.weight"] /= factors
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    save_file(dense, model / "2_Dense" / "model.safetensors")


def lose_the_dense_module(model: Path) -> None:
    scale_dimensions(model)
    lose_module(2)(model)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "pooling lost": pool_by(pooling_mode_mean_tokens=True),
    "wrong pooling": pool_by(pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True),
    "prompts lost": lose_prompts,
    "dense module lost": lose_the_dense_module,
    "normalization lost": lose_module(3),
}


def compare(released: Released, name: str, change: Callable[[Path], object], *options: str) -> Result:
    """Compare the release with a changed copy of itself."""
    project, release = released
    shutil.copytree(release, copy := project.root / name.replace(" ", "-"), dirs_exist_ok=True)
    change(copy)
    return project.mergegate("compare", str(release), str(copy), "--profile", "profiles/demo-embeddings.yaml", *options)


@pytest.mark.parametrize("name", sampled(DAMAGE, ["prompts lost"], pytest.mark.proof))
def test_a_damaged_merge_is_refused(name: str, released: Released) -> None:
    result = compare(released, name, DAMAGE[name], "--json")
    outcome = json.loads(result.stdout)
    assert (result.exit_code, outcome["status"]) == (3, "refused")
    assert "fail" in {guard["outcome"] for guard in outcome["content"]["verdict"]["guards"]}


@pytest.mark.parametrize("change", [pytest.param(lambda _: None, marks=pytest.mark.proof), scale_dimensions])
def test_an_equal_model_passes(change: Callable[[Path], None], released: Released) -> None:
    expect(compare(released, "equal", change), 0)


def test_a_merge_without_its_modules_is_refused_with_the_reason(released: Released) -> None:
    """A merge of the transformers alone, which sentence-transformers would load with another pooling."""
    result = compare(released, "modules lost", lambda model: (model / "modules.json").unlink())
    assert result.exit_code in (2, 3)
    assert "retrieval" in result.output or "kind" in result.output
