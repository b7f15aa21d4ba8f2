"""What ``check`` says and refuses for each kind of model, before anything is merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from demo_project import Project, expect
from pydantic import TypeAdapter
from tiny_kinds import pair

from mergegate.flows.compare import make_comparison
from mergegate.flows.preflight import Problems, preflight_profile
from mergegate.flows.profile import load_profile
from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind, TaskForm, find_kind
from mergegate.merge_core.checkpoint import Companions
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.store import digest
from mergegate.tasks.preflight import NEXT_TOKENS, KindDemand, describe_judging, kind_findings
from mergegate.tasks.quality.gate import GatePlan, GateRule, describe_untested

CLASSES = {
    "text generator": "LlamaForCausalLM",
    "vision-language": "LlavaForConditionalGeneration",
    "sequence-to-sequence": "T5ForConditionalGeneration",
    "speech": "WhisperForConditionalGeneration",
    "classifier": "BertForTokenClassification",
    "other": "BertForMaskedLM",
}
KINDS = {name: find_kind({"architectures": [class_name]}, Companions()) for name, class_name in CLASSES.items()}
KINDS["embedding"] = ModelKind("embedding", loader="SentenceTransformer", task_forms=("retrieval",))
KINDS["cross-encoder"] = find_kind(
    {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, Companions()
)
FORMS: tuple[TaskForm, ...] = ("text", "retrieval", "transcription")
NEGATIVES = ["w39 w38 w37", "w36 w35 w34"]
RETRIEVAL = {"task": {"kind": "retrieval", "data": "queries.jsonl"}, "guarded_by": "a"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two parents of several kinds."""
    root = tmp_path_factory.mktemp("parents")
    for name in ("bert embedding", "t5", "sequence classifier"):
        pair(name, root / name.split()[-1])
    return root


@pytest.fixture
def project(tmp_path: Path, written: Path) -> Project:
    for kind in written.iterdir():
        (tmp_path / kind.name).symlink_to(kind)
    rows = [
        {"query": f"w{number % 40} w{number // 40}", "positives": [f"w{number % 40}"], "negatives": NEGATIVES}
        for number in range(300)
    ]
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Project(tmp_path)


def write_profile(project: Project, kind: str, **sections: object) -> str:
    models = [{"model": f"{kind}/{name}", "parameters": {"weight": 0.5}} for name in "ab"]
    recipe = {"merge_method": "linear", "models": models, "dtype": "float32"}
    (project.root / "profile.yaml").write_text(yaml.safe_dump({"name": "kinds", "recipe": recipe, **sections}))
    return "profile.yaml"


def test_every_kind_has_a_name_of_its_own() -> None:
    assert {name: kind.name for name, kind in KINDS.items()} == {name: name for name in KINDS}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_guard_is_refused_if_the_kind_of_the_merge_lacks_its_form(kind: ModelKind, form: TaskForm) -> None:
    findings = list(kind_findings(kind, [KindDemand("evaluate.tasks: t", f"a {form} task", form)]))
    assert [finding.severity for finding in findings] == ([] if form in kind.task_forms else ["block"])
    for finding in findings:
        assert kind.noun in finding.found
        assert finding.remedy


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_check_of_next_tokens_is_refused_for_a_kind_that_does_not_predict_them(kind: ModelKind) -> None:
    findings = list(kind_findings(kind, [KindDemand("perplexity", "a perplexity", NEXT_TOKENS)]))
    assert bool(findings) == (kind.name not in ("text generator", "vision-language"))


def test_a_kind_that_cannot_be_evaluated_is_refused_once_and_only_if_the_profile_judges_it() -> None:
    demands = [KindDemand("evaluate.tasks: t", "a text task", "text"), KindDemand("serve", "a test", NEXT_TOKENS)]
    for name in ("classifier", "other"):
        (finding,) = kind_findings(KINDS[name], demands)
        assert "mergegate cannot evaluate" in finding.found
        assert "mergegate merge" in finding.remedy
        assert not list(kind_findings(KINDS[name], []))
    assert describe_judging(KINDS["classifier"]) == "which mergegate merges but cannot evaluate"
    assert describe_judging(TEXT_GENERATOR) == "judged by text tasks"


@pytest.mark.parametrize(
    "kind",
    [
        ModelKind("embedding", library="sentence-transformers", task_forms=("retrieval",)),
        ModelKind("cross-encoder", loader="CrossEncoder", task_forms=("retrieval",)),  # a classifier with one label
    ],
    ids=["embedding", "classifier"],
)
def test_a_missing_library_is_found_with_the_command_that_installs_it(
    kind: ModelKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    demands = [KindDemand("evaluate.tasks: t", "a retrieval task", "retrieval")]
    assert not list(kind_findings(kind, demands))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (finding,) = kind_findings(kind, demands)
    assert "sentence-transformers" in finding.found
    assert finding.remedy == "pip install 'mergegate[embeddings]'"


@pytest.mark.story
def test_check_accepts_a_retrieval_guard_on_embedding_models_and_refuses_their_perplexity(project: Project) -> None:
    result = project.mergegate("check", write_profile(project, "embedding", evaluate={"tasks": [RETRIEVAL]}))
    expect(result, 0, "✓ kind: an embedding model, judged by retrieval tasks")
    (project.root / "text.txt").write_text("".join(f"Some text {number}.\n\n" for number in range(20)))
    sections = {"perplexity": {"documents": "text.txt"}, "evaluate": {"tasks": [RETRIEVAL]}}
    result = project.mergegate("check", write_profile(project, "embedding", **sections))
    refused = "✗ perplexity: a perplexity, but the merge is an embedding model"
    expect(result, 2, refused, "kind: retrieval, data: queries.jsonl")


def test_a_run_and_a_comparison_stop_before_models_that_the_guards_do_not_fit(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("MERGEGATE_HOME", str(project.home))
    monkeypatch.setattr(Problems, "ask", lambda self, stage, *inputs: stage.build(*inputs))  # without a flow
    profile = load_profile(Path(write_profile(project, "classifier", evaluate={"tasks": [RETRIEVAL]})))
    with pytest.raises(InvalidInput, match=r"a classifier \(text-classification\), which mergegate cannot evaluate"):
        preflight_profile(profile, Problems(stop_at_once=True))
    profile = load_profile(Path(write_profile(project, "embedding", evaluate={"tasks": [RETRIEVAL]})))
    with pytest.raises(InvalidInput, match="a retrieval task, but b is a sequence-to-sequence model"):
        make_comparison("embedding/a", "t5/b", profile)


@pytest.mark.story
def test_a_merge_of_classifiers_needs_no_verdict(project: Project) -> None:
    write_profile(project, "classifier")
    recipe = yaml.safe_load((project.root / "profile.yaml").read_text())["recipe"]
    (project.root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert project.mergegate("check", "profile.yaml").exit_code == 0
    assert project.mergegate("merge", "recipe.yaml", "out").exit_code == 0
    assert (project.root / "out/model.safetensors").is_file()


@pytest.mark.story
def test_a_plan_says_the_kind(project: Project) -> None:
    profile = write_profile(project, "embedding", evaluate={"tasks": [RETRIEVAL]})
    assert "The merge is an embedding model" in project.mergegate("plan", profile, "--no-probe").output
    assert json.loads(project.mergegate("plan", profile, "--no-probe", "--json").output)["kind"] == "embedding"


@pytest.mark.story
@pytest.mark.parametrize("kind", ["embedding", "t5", "classifier"])
def test_init_writes_a_profile_that_check_accepts(project: Project, kind: str) -> None:
    expect(project.mergegate("init", f"{kind}/a", f"{kind}/b", "--yes", "--name", "new", "-o", "new"), 0)
    profile = yaml.safe_load((project.root / "new/new.yaml").read_text())
    assert "perplexity" not in profile
    assert ("publish" in profile) == ("evaluate" in profile) == (kind == "embedding")
    assert project.mergegate("check", "new/new.yaml").exit_code == 0


@pytest.mark.story
def test_init_takes_queries_as_a_task_and_refuses_a_task_of_text(project: Project) -> None:
    models = ("embedding/a", "embedding/b", "--yes", "--name")
    assert project.mergegate("init", *models, "good", "--task", "queries.jsonl:b").exit_code == 0
    (guard,) = yaml.safe_load((project.root / "good.yaml").read_text())["evaluate"]["tasks"]
    assert (guard["task"], guard["guarded_by"]) == ({"kind": "retrieval", "data": "queries.jsonl"}, "b")
    for option in (("--task", "gsm8k"), ("--data", "queries.jsonl")):
        expect(project.mergegate("init", *models, "bad", *option), 2, "the merge is an embedding model")


def test_two_metrics_of_one_file_are_two_tasks_with_names(project: Project) -> None:
    mean = {**RETRIEVAL, "task": {**RETRIEVAL["task"], "metric": "mrr"}}  # type: ignore[dict-item]
    result = project.mergegate(
        "check", write_profile(project, "embedding", evaluate={"rule": "each", "tasks": [RETRIEVAL, mean]})
    )
    expect(result, 2, "set name: queries-2 in one of the guards")
    named = {"rule": "each", "tasks": [RETRIEVAL, {**mean, "name": "queries-mrr"}]}
    assert project.mergegate("check", write_profile(project, "embedding", evaluate=named)).exit_code == 0


def test_a_release_records_what_was_not_tested_and_text_generators_keep_their_record() -> None:
    plan = GatePlan(GateRule(), untested="only text was tested: no task tests how the merge reads pictures")
    recorded = TypeAdapter(GatePlan).dump_python(plan, mode="json")
    assert TypeAdapter(GatePlan).validate_python(recorded) == plan
    assert digest(plan) != digest(GatePlan(GateRule()))
    assert "untested" not in TypeAdapter(GatePlan).dump_python(GatePlan(GateRule()), mode="json")
    assert "untested" not in GatePlan(GateRule()).content_key()  # type: ignore[operator]


def test_a_sense_counts_as_tested_if_a_task_has_its_form() -> None:
    kind = find_kind({"architectures": ["Qwen2_5OmniForConditionalGeneration"]}, Companions())
    assert kind.modalities == ("pictures", "sound")
    assert describe_untested(kind, ()) == describe_untested(kind, ["text"])
    assert describe_untested(kind, ["text"]).startswith("only text was tested")
    assert describe_untested(kind, ["text", "pictures"]) == "no task tests how the merge reads sound"
    assert describe_untested(kind, ["pictures", "transcription"]) == ""
    assert describe_untested(KINDS["embedding"], ["retrieval"]) == ""
