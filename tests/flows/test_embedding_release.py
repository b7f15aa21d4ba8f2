"""Release a merge of embedding models, and refuse merges that lost a part of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from demo_project import PROFILES, Project, make_project
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

Released = tuple[Project, Path]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Released:
    """Return a project with the release of ``demo-embeddings.yaml``, and the directory of the release."""
    project = make_project(tmp_path_factory.mktemp("embeddings"))
    result = project.mergegate("run", "profiles/demo-embeddings.yaml")
    assert result.exit_code == 0, result.output
    return project, project.root / "releases" / "demo-embeddings" / "latest"


def test_the_demo_of_embedding_models_is_released(released: Released) -> None:
    project, release = released
    verdict = json.loads(next(release.glob("**/verdict*.json"), release / "provenance.json").read_text())
    assert verdict
    assert (release / "1_Pooling" / "config.json").is_file()
    assert (release / "2_Dense" / "model.safetensors").is_file()


def test_the_release_ranks_like_a_merge_in_memory(released: Released) -> None:
    """Task arithmetic with weights of 1 is the sum of the parents without the base, in bfloat16."""
    from sentence_transformers import SentenceTransformer

    models = PROFILES / "demo" / "models"
    parents = [
        SentenceTransformer(str(models / name), device="cpu", model_kwargs={"dtype": "float32"})
        for name in ("embed-base", "embed-garden", "embed-harbor")
    ]
    base, garden, harbor = (parent.state_dict() for parent in parents)
    merged = parents[0]
    merged.load_state_dict(
        {
            name: garden[name] + harbor[name] - tensor
            if tensor.is_floating_point() and "pooler" not in name
            else tensor
            for name, tensor in base.items()
        }
    )
    release = SentenceTransformer(str(released[1]), device="cpu", model_kwargs={"dtype": "float32"})
    rows = [json.loads(line) for line in (PROFILES / "demo" / "data" / "garden.jsonl").read_text().splitlines()[:50]]
    queries = [row["query"] for row in rows]
    cosines = (release.encode_query(queries) * merged.encode_query(queries)).sum(axis=1)
    assert cosines.min() > 0.999


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


def keep_the_dense_weights_of_the_base(model: Path) -> None:
    source = PROFILES / "demo" / "models" / "embed-base" / "2_Dense" / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(source).items()}, model / "2_Dense" / "model.safetensors")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "pooling lost": lose_pooling,
    "wrong pooling": pool_the_last_token,
    "prompts lost": lose_prompts,
    "dense module lost": lose_module(2),
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
    print(name, {task: (guard["outcome"], guard["drop"]) for task, guard in guards.items()})
    assert result.exit_code == 3
    assert outcome["status"] == "refused"
    assert "fail" in {guard["outcome"] for guard in guards.values()}


def test_an_undamaged_copy_passes(released: Released) -> None:
    project, release = released
    copy = damaged(release, project.root / "copy", lambda _: None)
    result = project.mergegate(
        "compare", str(release), str(copy), "--profile", "profiles/demo-embeddings.yaml", "--json"
    )
    assert result.exit_code == 0, result.output
