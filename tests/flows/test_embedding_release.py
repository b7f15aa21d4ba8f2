"""Release a merge of embedding models, and refuse merges that lost a part of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from demo_project import PROFILES, Project, make_project
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.story

Released = tuple[Project, Path]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Released:
    """Return a project with the release of ``demo-embeddings.yaml``, and the directory of the release."""
    project = make_project(tmp_path_factory.mktemp("embeddings"))
    result = project.mergegate("run", "profiles/demo-embeddings.yaml")
    assert result.exit_code == 0, result.output
    return project, project.root / "releases" / "demo-embeddings" / "latest"


def test_the_demo_of_embedding_models_is_released_with_its_modules(released: Released) -> None:
    _, release = released
    for file in (
        "modules.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
    ):
        assert (release / file).is_file()


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


def edit_json(file: Path, change: Callable[[object], object]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def lose_pooling(model: Path) -> None:
    """Pool like sentence-transformers does without a pooling module."""
    pooling = model / "1_Pooling" / "config.json"
    size = json.loads(pooling.read_text())
    dimension = size.get("embedding_dimension") or size.get("word_embedding_dimension")
    pooling.write_text(json.dumps({"word_embedding_dimension": dimension, "pooling_mode_mean_tokens": True}))


def lose_prompts(model: Path) -> None:
    edit_json(
        model / "config_sentence_transformers.json",
        lambda settings: {**settings, "prompts": {"query": "", "document": ""}},  # type: ignore[dict-item]
    )


def lose_module(number: int) -> Callable[[Path], None]:
    def lose(model: Path) -> None:
        edit_json(model / "modules.json", lambda modules: [each for each in modules if each["idx"] != number])  # type: ignore[attr-defined]

    return lose


def pool_the_last_token(model: Path) -> None:
    lose_pooling(model)
    edit_json(
        model / "1_Pooling" / "config.json",
        lambda settings: {  # type: ignore[dict-item]
            **settings,
            "pooling_mode_mean_tokens": False,
            "pooling_mode_lasttoken": True,
        },
    )


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
    "pooling lost": lose_pooling,
    "wrong pooling": pool_the_last_token,
    "prompts lost": lose_prompts,
    "dense module lost": lose_the_dense_module,
    "normalization lost": lose_module(3),
}


def damaged(release: Path, directory: Path, damage: Callable[[Path], None]) -> Path:
    shutil.copytree(release, directory, dirs_exist_ok=True, symlinks=False)
    damage(directory)
    return directory


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_merge_is_refused(name: str, released: Released) -> None:
    project, release = released
    broken = damaged(release, project.root / name.replace(" ", "-"), DAMAGE[name])
    result = project.mergegate(
        "compare", str(release), str(broken), "--profile", "profiles/demo-embeddings.yaml", "--json"
    )
    outcome = json.loads(result.stdout)
    guards = {guard["task"]: guard for guard in outcome["content"]["verdict"]["guards"]}
    assert result.exit_code == 3
    assert outcome["status"] == "refused"
    assert "fail" in {guard["outcome"] for guard in guards.values()}


@pytest.mark.parametrize("change", [lambda _: None, scale_dimensions], ids=["copy", "other weights"])
def test_an_equal_model_passes(change: Callable[[Path], None], released: Released) -> None:
    project, release = released
    copy = damaged(release, project.root / "equal", change)
    result = project.mergegate(
        "compare", str(release), str(copy), "--profile", "profiles/demo-embeddings.yaml", "--json"
    )
    assert result.exit_code == 0, result.output


def test_a_merge_without_its_modules_is_refused_with_the_reason(released: Released) -> None:
    """A merge of the transformers alone, which sentence-transformers would load with another pooling."""
    project, release = released
    broken = damaged(release, project.root / "modules-lost", lambda model: (model / "modules.json").unlink())
    result = project.mergegate("compare", str(release), str(broken), "--profile", "profiles/demo-embeddings.yaml")
    assert result.exit_code in (2, 3)
    assert "retrieval" in result.output or "kind" in result.output
