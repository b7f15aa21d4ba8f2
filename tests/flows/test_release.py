"""A release from the user's point of view: its claims are true, refusals give reasons, and no work is repeated."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from demo_project import PROFILES, Printed, Project
from sheet_sources import require_correct_sheet

from mergegate.tasks.report import read_history

Released = tuple[Project, Printed]


def exact_match(model_directory: Path, task: str) -> float:
    """Return the share of correct greedy answers: plain transformers, one document at a time, without lm-eval."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16).eval()
    documents = [json.loads(line) for line in (PROFILES / "demo" / "data" / f"{task}.jsonl").read_text().splitlines()]
    right = 0
    for document in documents:
        prompt = tokenizer.encode(document["prompt"], add_special_tokens=False)
        answer = tokenizer.encode(document["answer"], add_special_tokens=False)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        right += logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    return right / len(documents)


def test_the_demo_is_released(released: Released) -> None:
    project, result = released
    assert result.exit_code == 0, result.output
    assert "released demo" in result.output
    assert (project.latest / "model.safetensors").is_file()
    assert project.latest.is_symlink()


@pytest.mark.parametrize("task", ["copy", "reverse", "shift"])
def test_the_released_model_has_the_skills_that_its_report_states(
    released: Released, demo_release: Path, task: str
) -> None:
    project, _ = released
    (path,) = (Project(demo_release).home / "store" / "report").iterdir()  # Other tests add reports to ``project``.
    report = json.loads((path / "report.json").read_text())
    merged = next(model for model in report["models"] if model["role"] == "merge")
    stated = next(score["score"] for score in merged["scores"]["tasks"] if score["task"] == task)
    # lm-eval runs in batches. In bfloat16 this can flip a close call, in at most two documents of 400.
    assert exact_match(project.latest, task) == pytest.approx(stated, abs=2 / 400)
    assert stated > 0.97


def test_the_release_says_where_it_comes_from(released: Released) -> None:
    project, _ = released
    provenance = json.loads((project.latest / "provenance.json").read_text())
    names = {subject["name"] for subject in provenance["subject"]}
    assert names == {
        path.relative_to(project.latest).as_posix() for path in project.latest.rglob("*") if path.is_file()
    } - {"provenance.json", "SHA256SUMS"}
    card = (project.latest / "README.md").read_text()
    assert "license: apache-2.0" in card
    for text in (json.dumps(provenance), card, (project.latest / "report.html").read_text()):
        assert str(project.root) not in text
        assert str(PROFILES) not in text


def test_the_compliance_sheet_agrees_with_its_sources(released: Released) -> None:
    project, _ = released
    # Elements · three models · 64 operations · the units of ties: 2.6 for the result, 1.2 for each of up to 6 passes.
    elements = 280_416 * 3 * 64
    require_correct_sheet(
        project.latest, project.root / "profiles" / "demo.yaml", (elements * 2.6, elements * (2.6 + 6 * 1.2))
    )


def test_the_history_knows_what_the_report_says(released: Released) -> None:
    project, _ = released
    night = read_history(project.home / "reports").records[0]
    assert (night.profile, night.flow, night.status, night.method) == (
        "demo",
        "release",
        "released",
        "ties of 2 over base",
    )
    assert night.version == project.latest.resolve().name
    assert [one.name for one in night.parents] == ["base", "reverser", "shifter"]
    assert {one.task: one.limit for one in night.scores if one.merge is not None} == dict.fromkeys(
        ("copy", "reverse", "shift"), "3, margin 4"
    )
    assert night.bytes_made > night.bytes_merged > 500_000
    stages = {one.name: (one.calls, one.cached) for one in night.stages}
    assert stages["perplexity"] == (4, 0)
    page = (project.home / "reports" / night.report).read_text(encoding="utf-8")
    assert "This is the first recorded run of this profile." in page


def test_a_second_run_finds_nothing_new_and_makes_nothing(released: Released) -> None:
    project, _ = released
    before = {path: path.lstat().st_mtime_ns for path in sorted(project.root.glob("releases/**/*"))}
    stages = {
        stage.name: project.artifacts(stage.name) for stage in (project.home / "store").iterdir() if stage.is_dir()
    }
    result = project.mergegate("run", "profiles/demo.yaml")
    assert result.exit_code == 0
    assert "nothing new" in result.output
    before_it, last = read_history(project.home / "reports").runs_of("demo", "release")[-2:]
    assert (last.status, last.bytes_made, last.scores) == ("nothing new", 0, before_it.scores)
    page = (project.home / "reports" / last.report).read_text(encoding="utf-8")
    assert "Parents, recipe, limits and scores are unchanged" in page
    assert before_it.report.rpartition("/")[2] in page
    assert "✓" not in "".join(line[:4] for line in result.output.splitlines())
    assert {path: path.lstat().st_mtime_ns for path in sorted(project.root.glob("releases/**/*"))} == before
    assert stages == {stage: project.artifacts(stage) for stage in stages}


def test_the_plain_average_is_refused_for_the_skill_it_loses(released: Released) -> None:
    project, _ = released
    result = project.mergegate("run", "profiles/demo-refused.yaml")
    assert result.exit_code == 3
    sentence = re.search(
        r"reverse lost ([\d.]+) points against reverser, at least ([\d.]+); max_drop is 3", result.output
    )
    assert sentence, result.output
    drop, low = (float(group) for group in sentence.groups())
    assert 3 < low < drop
    assert not (project.root / "releases" / "demo-refused").exists()
    assert (project.home / "reports" / "demo-refused.html").is_file()


@pytest.mark.story
def test_prompts_that_are_cut_to_eight_tokens_release_nothing(released: Released) -> None:
    project, _ = released
    profile = project.root / "profiles" / "short.yaml"
    text = (project.root / "profiles" / "demo-refused.yaml").read_text()
    profile.write_text(text.replace("evaluate:\n", "evaluate:\n  max_length: 8\n").replace("demo-refused", "short"))
    assert "a loss could not show" not in " ".join(project.mergegate("check", "profiles/short.yaml").output.split())
    result = project.mergegate("run", "profiles/short.yaml")
    assert result.exit_code == 3, result.output
    assert not (project.root / "releases" / "short").exists()
    output = " ".join(result.output.split())
    assert "reverse cannot show a loss, because reverser scores 0.0, and an empty answer would score 0.0" in output
    # The next check knows the scores of the parents, and says so before a merge is evaluated.
    checked = " ".join(project.mergegate("check", "profiles/short.yaml").output.split())
    assert "reverse: reverser scores 0.0, and an empty answer would score 0.0, so a loss could not show" in checked


@pytest.mark.story
def test_parents_are_evaluated_once_ever(released: Released) -> None:
    project, _ = released
    models = [
        {"model": f"demo/models/{name}", "parameters": {"weight": weight}}
        for name, weight in (("reverser", 0.91), ("shifter", 0.09))  # A merge without scores in the store.
    ]
    text = (project.root / "profiles" / "demo-lopsided.yaml").read_text().replace("name: demo-lopsided", "name: once")
    recipe = json.dumps({"merge_method": "linear", "dtype": "bfloat16", "models": models})
    (project.root / "profiles" / "once.yaml").write_text(text.replace("demo/recipes/lopsided.yaml", recipe))
    project.mergegate("run", "profiles/demo-refused.yaml")
    before = project.artifacts("evaluate")
    result = project.mergegate("run", "profiles/once.yaml")
    new = project.artifacts("evaluate") - before
    assert re.search(r"cached: reverser, shifter · merge", result.output)
    verdict = json.loads(project.mergegate("run", "profiles/once.yaml", "--json").stdout)["content"]["verdict"]
    judged = {guard["task"] for guard in verdict["guards"]}
    skipped = {one["task"] for one in verdict["not_run"]}  # The order of tasks depends on how long they took.
    assert judged | skipped == {"copy", "reverse", "shift"}
    assert len(new) == len(judged)  # The merge; its parents are cached.


def test_a_lost_skill_that_perplexity_cannot_see_is_refused(released: Released) -> None:
    project, _ = released
    result = project.mergegate("run", "profiles/demo-lopsided.yaml", "--json")
    assert result.exit_code == 3
    verdict = json.loads(result.stdout)["content"]["verdict"]
    assert verdict["drift"]["outcome"] == "pass"
    assert {guard["task"]: guard["outcome"] for guard in verdict["guards"]}["shift"] == "fail"


@pytest.mark.story
def test_a_broken_merge_is_refused_by_perplexity_before_any_task_is_run(released: Released) -> None:
    project, _ = released
    before = project.artifacts("evaluate")
    result = project.mergegate("run", "profiles/demo-exploding.yaml")
    assert result.exit_code == 3
    assert "perplexity is" in result.output
    assert project.artifacts("evaluate") == before
    assert not (project.root / "releases" / "demo-exploding").exists()


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("demo-forbidden", "cc-by-nd-4.0 (of no-derivatives) does not permit"),
        ("demo-tokenizer", "tokens have different ids"),
    ],
)
def test_a_parent_that_must_not_be_merged_is_refused_before_any_weight_is_read(
    project: Project, profile: str, words: str
) -> None:
    result = project.mergegate("run", f"profiles/{profile}.yaml")
    assert result.exit_code == 3
    assert words in result.output
    assert project.artifacts("merge") == set()
    weights = {path.stat().st_ino for path in (PROFILES / "demo" / "models").glob("*/model.safetensors")}
    with sqlite3.connect(project.home / "store" / "hashes.sqlite") as memo:
        hashed = {inode for (inode,) in memo.execute("SELECT inode FROM hashes")}
    assert not hashed & weights


def test_check_finds_the_same_without_running_anything(project: Project) -> None:
    for profile, words in (("demo-forbidden", "does not permit"), ("demo-tokenizer", "tokens have different ids")):
        result = project.mergegate("check", f"profiles/{profile}.yaml")
        assert result.exit_code == 3
        assert words in result.output
    good = project.mergegate("check", "profiles/demo.yaml", "--json")
    assert good.exit_code == 0
    assert json.loads(good.stdout)["remarks"] == []


@pytest.mark.parametrize(
    ("old", "new", "advice"),
    [
        ("max_increase", "max_incraese", "did you mean 'max_increase'?"),
        ("guarded_by: reverser", "guarded_by: revreser", "did you mean 'reverser'?"),
        ("recipe: demo/recipes/ties.yaml", "recipe: {merge_method: tise, models: []}", "did you mean 'ties'?"),
        ("demo/data/held-out.jsonl", "demo/data/hold-out.jsonl", "no such file"),
    ],
)
def test_what_cannot_mean_anything_exits_2_with_advice_and_no_traceback(
    project: Project, old: str, new: str, advice: str
) -> None:
    result = project.mergegate("run", project.edit("demo.yaml", old, new))
    assert result.exit_code == 2
    assert advice in result.output
    assert "Traceback" not in result.output


def test_a_changed_threshold_runs_only_the_gate(released: Released) -> None:
    project, _ = released
    costly = ("merge", "perplexity", "evaluate")
    before = {stage: project.artifacts(stage) for stage in costly}
    gates = project.artifacts("gate")
    profile = project.edit("demo.yaml", "guarded_by: reverser, max_drop: 3", "guarded_by: reverser, max_drop: 1")
    project.mergegate("run", profile)
    assert {stage: project.artifacts(stage) for stage in costly} == before
    assert len(project.artifacts("gate") - gates) == 1


@pytest.mark.story
@pytest.mark.parametrize("damage", ["deleted", "truncated", "altered"])
def test_a_damaged_merge_is_noticed_and_rebuilt_to_the_same_release(released: Released, damage: str) -> None:
    project, _ = released
    released_before = project.latest.resolve()
    for artifact in (project.home / "store" / "merge").iterdir():
        weights = artifact / "model.safetensors"
        match damage:
            case "deleted":
                shutil.rmtree(artifact)
            case "truncated":
                weights.write_bytes(weights.read_bytes()[:-100])
            case "altered":
                data = bytearray(weights.read_bytes())
                data[-1] ^= 1
                weights.write_bytes(bytes(data))
    result = project.mergegate("run", "profiles/demo.yaml")
    assert result.exit_code == 0
    assert re.search(r"✓ merge", result.output)
    assert "nothing new" in result.output
    assert project.latest.resolve() == released_before


def test_an_altered_release_is_not_taken_for_the_one_that_was_gated(released: Released) -> None:
    project, _ = released
    card = project.latest / "README.md"
    original = card.read_bytes()
    card.write_bytes(original + b"\nedited by hand\n")
    try:
        result = project.mergegate("run", "profiles/demo.yaml")
        assert result.exit_code == 3
        assert "already published with other content" in result.output
    finally:
        card.write_bytes(original)


def test_without_a_target_the_gate_is_the_end(released: Released) -> None:
    project, _ = released
    text = (project.root / "profiles" / "demo.yaml").read_text()
    profile = project.edit("demo.yaml", text[text.index("publish:") :], "")
    result = project.mergegate("run", profile, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["status"] == "passed"


def test_json_has_all_facts(released: Released) -> None:
    project, _ = released
    outcome = json.loads(project.mergegate("run", "profiles/demo.yaml", "--json").stdout)
    assert outcome["status"] == "nothing new"
    assert Path(outcome["location"]).resolve() == project.latest.resolve()
    assert [guard["outcome"] for guard in outcome["content"]["verdict"]["guards"]] == ["pass"] * 3


@pytest.mark.parametrize("method", ["slerp", "dare_ties", "linear"])
def test_merge_makes_a_checkpoint_that_loads(project: Project, method: str) -> None:
    from transformers import AutoModelForCausalLM

    out = project.root / "merged"
    result = project.mergegate("merge", f"profiles/demo/recipes/{method}.yaml", str(out))
    assert result.exit_code == 0, result.output
    AutoModelForCausalLM.from_pretrained(out)
    again = project.mergegate("merge", f"profiles/demo/recipes/{method}.yaml", str(out))
    assert again.exit_code == 0
    assert "nothing new" in again.output
    other = project.mergegate("merge", f"profiles/demo/recipes/{method}.yaml", str(out), "--seed", "1")
    assert other.exit_code == 2
    assert "it exists" in other.output
