"""A wordy parent: a token budget decides nothing, and longer answers show what the merge lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_project import Project, make_project
from openai_server import serving

from mergegate.tasks.models.checkpoints.model import Model

PARENTS = ("reverser", "shifter", "thinker")
FEW = 80  # documents for backends that answer slowly here
LAST_WORD = {"function": "regex", "regex_pattern": "([a-p]+)\\s*$"}
TASK = {
    "task": "written", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "words.jsonl"}},
    "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
    "target_delimiter": "", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 40, "do_sample": False},
    "filter_list": [{"name": "last", "filter": [LAST_WORD, {"function": "take_first"}]}],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1.0},
}  # fmt: skip


class Family:
    """A project with the wordy parent, and runs of its profile with different settings."""

    def __init__(self, root: Path) -> None:
        self.project: Project = make_project(root)
        self.profiles = root / "profiles"
        words = (self.profiles / "demo" / "data" / "reverse.jsonl").read_text().splitlines(keepends=True)
        for count in (FEW, len(words)):
            (self.profiles / f"words{count}.jsonl").write_text("".join(words[:count]))
            data = {"data_files": {"test": f"words{count}.jsonl"}}
            (self.profiles / f"written{count}.yaml").write_text(yaml.safe_dump({**TASK, "dataset_kwargs": data}))
        self.documents = len(words)
        models = [{"model": f"demo/models/{name}", "parameters": {"weight": 0.5}} for name in PARENTS]
        models[-1]["parameters"] = {"weight": 0.0}
        recipe = {"merge_method": "linear", "models": models, "dtype": "bfloat16"}
        (self.profiles / "wordy.yaml").write_text(yaml.safe_dump(recipe))

    def run(self, name: str, documents: int, **evaluate: Any) -> tuple[int, dict[str, Any], str]:
        """Return the exit code, the gate's verdict and the printed lines of a run."""
        guard = {"task": f"written{documents}.yaml", "guarded_by": "thinker"}
        profile = {
            "name": name,
            "recipe": "wordy.yaml",
            "evaluate": {"tasks": [guard], **evaluate},
            "publish": {"to": "directory", "path": f"../releases/{name}"},
        }
        (self.profiles / f"{name}.yaml").write_text(yaml.safe_dump(profile))
        result = self.project.mergegate("run", f"profiles/{name}.yaml", "--json")
        outcome = json.loads(result.stdout)
        return result.exit_code, outcome["content"]["verdict"], result.output

    def regenerated(self, documents: int) -> list[str]:
        """Return the model of each artifact that has longer answers to the task with so many documents."""
        store = self.project.home / "store" / "regenerate"
        values = [json.loads((store / key / "value.json").read_text()) for key in self.project.artifacts("regenerate")]
        return [value["model"] for value in values if {score["n"] for score in value["tasks"]} == {documents}]

    def models(self) -> dict[str, Model]:
        """Return the parents and the merge under the names that they have in a run."""
        directories = {name: self.profiles / "demo" / "models" / name for name in PARENTS}
        (merged,) = (self.project.home / "store" / "merge").glob("*/**/model.safetensors")
        places = {**directories, "merge": merged.parent}
        return {name: Model(name=name, digest=name, directory=place) for name, place in places.items()}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Family:
    """Return a project in which the merge exists and has been judged with 40 tokens."""
    found = Family(tmp_path_factory.mktemp("wordy") / "project")
    code, verdict, output = found.run("short", found.documents, max_answer_tokens=40)
    assert (code, verdict["outcome"]) == (3, "inconclusive"), output
    return found


@pytest.mark.proof
def test_only_cut_off_answers_are_generated_again_and_the_merge_is_refused(family: Family) -> None:
    code, verdict, _ = family.run("long", family.documents)
    (guard,) = verdict["guards"]
    assert (code, verdict["outcome"], guard["drop"]) == (3, "fail", 22.25)
    assert guard["look"]["number"] == 1
    assert guard["answers"]["reference"]["regenerated"] == 97
    assert guard["answers"]["merge"]["regenerated"] == 0
    assert guard["cut_answers"] is None
    assert family.regenerated(family.documents) == ["thinker"]  # one model, and one doubling
    printed = family.project.mergegate("run", "profiles/long.yaml").output
    assert "written: 97 answers of thinker generated again with up to 80 tokens" in printed
    page = (family.project.home / "reports" / "long.html").read_text().replace("<wbr>", "")
    assert "97 generated again with up to 80 tokens" in page
    known = family.project.artifacts("regenerate"), family.project.artifacts("evaluate")
    assert family.run("long", family.documents)[1] == verdict
    assert family.run("longest", family.documents, max_answer_tokens=80)[1]["guards"] == verdict["guards"]
    assert (family.project.artifacts("regenerate"), family.project.artifacts("evaluate")) == known
    # A comparison of two checkpoints generates answers again, too.
    models = family.models()
    directories = (str(models["thinker"].directory), str(models["merge"].directory))
    result = family.project.mergegate("compare", *directories, "--profile", "profiles/long.yaml", "--json")
    (guard,) = json.loads(result.stdout)["content"]["verdict"]["guards"]
    assert (result.exit_code, guard["outcome"], guard["drop"]) == (3, "fail", 22.25)


def check_both_budgets(family: Family, backend: str, **evaluate: Any) -> None:
    """Check the verdicts at both budgets on the first documents, which ``hf`` decides in the same way."""
    _, here, _ = family.run("few-hf", FEW)
    code, verdict, output = family.run(f"short-{backend}", FEW, backend=backend, max_answer_tokens=40, **evaluate)
    assert (code, verdict["outcome"]) == (3, "inconclusive"), output
    assert verdict["guards"][0]["cut_answers"]["decide"]
    code, verdict, output = family.run(f"long-{backend}", FEW, backend=backend, **evaluate)
    (guard,), (expected,) = verdict["guards"], here["guards"]
    assert (code, verdict["outcome"]) == (3, "fail"), output
    for key in ("drop", "lost", "won", "reference_score", "merge_score"):
        assert guard[key] == expected[key]
    assert guard["answers"]["reference"]["regenerated"] == expected["answers"]["reference"]["regenerated"] > 20


@pytest.mark.proof
def test_a_served_model_is_judged_in_the_same_way(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(family.models()) as server:
        check_both_budgets(family, "served", server={"url": server.url})
