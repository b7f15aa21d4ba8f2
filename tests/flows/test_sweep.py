"""A sweep from the command line: search, confirmation and release. Documents used for the search decide no verdict."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import small_sweeps
import yaml
from demo_project import PROFILES, SOURCES, Printed, Project, expect, make_project
from kept import digest_of, kept
from numpy.typing import NDArray

from mergegate.flows.attempt import sweep_candidates
from mergegate.flows.profile import parse_profile
from mergegate.merge_core import load_recipe, merge_weights, plan_merge
from mergegate.merge_core.checkpoint import open_checkpoint
from mergegate.tasks.quality.evaluation.scoring.document_scores import SCORES_FILE, read_document_scores
from mergegate.tasks.sweep import TrialRequest, start_recipe, trial_pool
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.study import request_key

DEMO = PROFILES / "demo"
Swept = tuple[Project, dict[str, Printed], int]


@pytest.fixture(scope="module")
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Swept:
    """Return a project with two finished sweeps, their output, and a trial count.

    One sweep was confirmed, released and then run again; the other had nothing to find. The count is the number of
    trials in the ledger before the second run.
    """
    sources = (*SOURCES, Path(small_sweeps.__file__))
    there = kept(request.config, "small-sweep", digest_of(sources), small_sweeps.make_swept)
    root = tmp_path_factory.mktemp("swept") / "project"
    shutil.copytree(there, root, symlinks=True)
    said, scored = json.loads((root / "printed.json").read_text())
    return Project(root), {name: Printed(*one) for name, one in said.items()}, scored


@pytest.mark.story
def test_a_confirmed_winner_is_released_and_its_recipe_file_reproduces_the_release(
    swept: Swept, tmp_path: Path
) -> None:
    project, printed, scored = swept
    assert printed["first"].exit_code == 0, printed["first"].output
    assert "held-out documents confirm a true lead of" in printed["first"].output  # Announced before the search.
    assert "confirmed: the winner is" in printed["first"].output
    assert f"released {small_sweeps.NAME}" in printed["first"].output
    assert scored == 10 + 2  # Ten recipes, and two of them on the confirmation documents.
    file = project.home / "sweeps" / f"{small_sweeps.NAME}-winner.yaml"
    assert "$" not in file.read_text()
    expect(project.mergegate("merge", str(file), str(tmp_path / "merged")), 0)
    weights = list((project.root / "releases" / small_sweeps.NAME / "latest").glob("*.safetensors"))
    assert weights
    for path in weights:
        assert (tmp_path / "merged" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.story
def test_a_repeated_sweep_does_nothing_new_and_one_without_a_better_candidate_confirms_none(swept: Swept) -> None:
    project, printed, scored = swept
    assert printed["again"].exit_code == 0, printed["again"].output
    for words in ("= search", "all cached", "nothing new"):
        assert words in printed["again"].output
    keys = Counter(record["scored"] for record in small_sweeps.scored_trials(project.home, "reverse"))
    assert set(keys.values()) == {1}
    assert len(keys) == scored

    assert printed["saturated"].exit_code == 3
    assert "no candidate confirmed" in printed["saturated"].output
    assert "no candidate confirmed" in (project.home / "reports" / "saturated.sweep.html").read_text()
    assert not (project.home / "sweeps" / "saturated-winner.yaml").exists()
    assert not (project.root / "releases" / "saturated").exists()
    assert len(project.artifacts("merge")) == 1  # The merge of the confirmed sweep.


@pytest.mark.story
def test_search_confirmation_and_gate_partition_the_documents(swept: Swept, tmp_path: Path) -> None:
    """The search scores the hand-written recipe on both sets of documents.

    The engine then writes the same merge, and a plain model scores it one document at a time. The numbers agree on
    exactly the documents that the gate has not scored.
    """
    project, _, _ = swept
    profile = yaml.safe_load((project.root / "profiles" / f"{small_sweeps.NAME}.yaml").read_text())
    document = yaml.safe_load((DEMO / "recipes/linear-searched.yaml").read_text())
    recipe = start_recipe(document, SweepSettings.model_validate(profile["sweep"]), "recipe")
    records = {record["scored"]: record for record in small_sweeps.scored_trials(project.home, "reverse")}
    asked = {
        name: small_sweeps.numbers_of(records[request_key(TrialRequest(recipe, document_set=name))])  # type: ignore[arg-type]
        for name in ("search", "confirmation")
    }
    loaded = load_recipe(recipe, location=f"{DEMO / 'recipes/linear-searched.yaml'}")
    parents = {str(ref): open_checkpoint(DEMO / "recipes" / str(ref)) for ref in loaded.references()}
    merge_weights(plan_merge(loaded, parents), tmp_path / "merged", seed=0, device="cpu")
    for task in small_sweeps.TASKS:
        rows = [json.loads(line) for line in (DEMO / "data" / f"{task}.jsonl").read_text().splitlines()]
        gate = _scored_by_the_gate(project, task)
        assert len(asked["search"][task]) == small_sweeps.SEARCH
        assert len(asked["confirmation"][task]) == small_sweeps.CONFIRMATION
        assert len(gate) == len(rows) - small_sweeps.SEARCH - small_sweeps.CONFIRMATION
        others = [row for number, row in enumerate(rows) if number not in gate]
        seen = np.concatenate([asked["search"][task], asked["confirmation"][task]])
        np.testing.assert_allclose(np.sort(seen), np.sort(_likelihoods(tmp_path / "merged", others)), atol=1e-5)


def _scored_by_the_gate(project: Project, task: str) -> set[int]:
    """Return the positions of all documents of a task on which the release scored any model."""
    tables = (project.home / "store" / "evaluate").glob(f"*/{SCORES_FILE}")
    return {row.doc_id for table in tables for row in read_document_scores(table) if row.task == task}


def _likelihoods(model: Path, rows: list[dict[str, str]]) -> NDArray[np.float64]:
    """Return the loss of each answer in nats per token, one document per forward pass."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for row in rows:
        prompt, whole = (tokenizer(text)["input_ids"] for text in (row["prompt"], row["prompt"] + row["answer"]))
        with torch.inference_mode():
            told = network(torch.tensor([whole])).logits[0].log_softmax(-1)
        answer = range(len(prompt), len(whole))
        found.append(sum(told[at - 1, whole[at]].item() for at in answer) / len(answer))
    return np.array(found)


@pytest.mark.story
def test_a_forbidden_choice_is_refused_before_any_merge(project: Project) -> None:
    recipe = {
        "merge_method": "$method",
        "base_model": "demo/models/base",
        "models": [
            {"model": "$who", "parameters": {"weight": 1.0, "density": 0.5}},
            {"model": "demo/models/shifter", "parameters": {"weight": 1.0, "density": 0.5}},
        ],
        "dtype": "bfloat16",
    }
    (project.root / "profiles" / "chosen.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    profile = small_sweeps.small_sweep() | {"recipe": "chosen.yaml"}
    models = [f"demo/models/{name}" for name in ("reverser", "no-derivatives")]
    for guard in profile["evaluate"]["tasks"]:
        guard["guarded_by"] = "best parent"  # The best parent differs from candidate to candidate.
    profile["sweep"]["parameters"] = {
        "method": {"type": "category", "choices": ["ties", "dare_ties"], "start": "ties"},
        "who": {"type": "category", "choices": models, "start": models[0]},
    }
    expect(project.mergegate("sweep", small_sweeps.write_profile(project, profile)), 3, "no-derivatives")
    assert not (project.home / "sweeps").exists()
    assert not project.artifacts("merge")


@pytest.mark.story
def test_a_profile_without_a_sweep_section_and_a_dashboard_of_a_soup_are_rejected(project: Project) -> None:
    expect(project.mergegate("sweep", "profiles/demo.yaml"), 2, "no section 'sweep'", "docs/how-to/search-a-recipe.md")
    result = project.mergegate("sweep", "profiles/demo-soup.yaml", "--dashboard")
    expect(result, 2, "--dashboard: a soup, which has no free parameters")


def sweep_by_name(project: Project) -> str:
    """Write a sweep on a task whose data are a Hub dataset, provided by ``evaluate.data``; return its profile."""
    letters = yaml.safe_load((DEMO / "tasks" / "reverse.yaml").read_text()) | {"task": "letters"}
    del letters["dataset_kwargs"]
    (project.root / "profiles" / "letters.yaml").write_text(yaml.safe_dump(letters | {"dataset_path": "acme/letters"}))
    profile = small_sweeps.small_sweep()
    profile["sweep"] |= {"objective": [{"task": "letters.yaml", "clip": 0.5}], "budget": {"trials": 4}}
    profile["evaluate"] |= {"data": "eval-data"}
    profile["evaluate"]["tasks"][0] |= {"task": "letters.yaml"}
    return small_sweeps.write_profile(project, profile)


def test_check_lists_missing_data_of_a_sweep(project: Project) -> None:
    name = sweep_by_name(project)
    for _ in range(2):  # First without the directory, then without the file.
        result = expect(project.mergegate("check", name, "--json"), 2)
        (told,) = [one for one in json.loads(result.stdout)["findings"] if one["where"].startswith("evaluate.data")]
        assert "acme/letters" in told["found"] + told["expected"]
        assert "mergegate fetch-data" in told["remedy"]
        (project.root / "profiles" / "eval-data").mkdir(exist_ok=True)
    assert "letters_test.jsonl" in told["expected"]


def test_hand_written_recipes_may_share_a_file_name(tmp_path: Path) -> None:
    for folder, weight in (("a", 0.3), ("b", 0.6)):
        (tmp_path / folder).mkdir()
        models = [{"model": str(DEMO / "models" / name)} for name in ("reverser", "shifter")]
        recipe = {"merge_method": "linear", "models": models, "parameters": {"weight": weight}}
        (tmp_path / folder / "mean.yaml").write_text(json.dumps(recipe))
    searched = {**recipe, "parameters": {"weight": "$weight"}}
    sweep = {
        "parameters": {"weight": {"low": 0.1, "high": 1.0, "start": 0.5}},
        "baselines": ["a/mean.yaml", "b/mean.yaml"],
        "objective": [{"task": "t.yaml"}],
    }
    profile = parse_profile({"root": tmp_path, "name": "two", "recipe": searched, "sweep": sweep}, "two.yaml")
    documents = [one.document for one in sweep_candidates(profile).by_hand]
    assert [one["parameters"] for one in documents if one] == [{"weight": 0.3}, {"weight": 0.6}]
    assert sweep_candidates(profile).labels == ("a/mean.yaml", "b/mean.yaml")


@pytest.mark.proof
def test_the_demo_soup_keeps_the_two_models_that_help_each_other(tmp_path: Path, prefect_api: None) -> None:
    project = make_project(tmp_path / "project")
    first = expect(project.mergegate("sweep", "profiles/demo-soup.yaml", "--no-release"), 0)
    results = {line.split()[0]: line.split()[-1] for line in first.output.splitlines() if len(line.split()) >= 5}
    assert (results["shifter"], results["reverser"]) == ("first", "kept")
    recipe = yaml.safe_load((project.home / "sweeps" / "demo-soup-winner.yaml").read_text())
    models = [Path(entry["model"]).name for entry in recipe["models"]]
    assert models == ["reverser", "shifter"]  # not base and thinker
    assert all(entry["parameters"] == {"weight": 1.0} for entry in recipe["models"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_pool, "score_trial", None)  # scoring another trial would fail
        again = project.mergegate("sweep", "profiles/demo-soup.yaml", "--no-release", "--json")
    assert again.exit_code == 0, again.output
    ingredients = json.loads(again.output)["sweep"]["soup"]["ingredients"]
    assert [item["outcome"] for item in ingredients] == ["first", "kept", "not added", "not added"]
