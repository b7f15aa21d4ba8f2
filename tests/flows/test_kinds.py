"""What ``check`` says and refuses for each kind of model, before anything is merged."""

from __future__ import annotations

import pytest

from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind, TaskForm, find_kind
from mergegate.merge_core.checkpoint import Companions
from mergegate.tasks.preflight import NEXT_TOKENS, KindDemand, describe_judging, kind_findings

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
    assert describe_judging(KINDS["classifier"]) == "merged, but not evaluated"
    assert describe_judging(TEXT_GENERATOR) == "judged by text tasks"


def test_a_missing_library_is_found_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ModelKind("embedding", library="sentence-transformers", task_forms=("retrieval",))
    demands = [KindDemand("evaluate.tasks: t", "a retrieval task", "retrieval")]
    assert not list(kind_findings(kind, demands))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (finding,) = kind_findings(kind, demands)
    assert "sentence-transformers" in finding.found
    assert finding.remedy == "pip install 'mergegate[embeddings]'"
