"""Publish 22 directories of all kinds: card and bill of materials name the task that the Hub documents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gate_samples import verdict_of
from huggingface_hub import ModelCard
from release_samples import (
    Publishable,
    content,
    cyclonedx_finds,
    license_verdict,
    needs_validators,
    publishable,
    sha,
    share,
    variant_parts,
)
from samples import sampled, sampled_rows

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.adapters.adapter import task_type
from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind, find_kind, kind_of_directory
from mergegate.merge_core.architecture.model_kinds import class_kinds
from mergegate.merge_core.checkpoint import Companions
from mergegate.tasks.quality.evaluation.scoring.scores import TaskScore
from mergegate.tasks.quality.gate import describe_untested
from mergegate.tasks.quality.gate.evidence import GateFinding
from mergegate.tasks.release.publish.content import BOM
from mergegate.tasks.release.publish.documents.card import loading_code
from mergegate.tasks.release.publish.documents.card_metadata import TASK_NAMES, card_metadata, released_kind
from mergegate.tasks.release.publish.documents.facts import MergeRelease
from mergegate.tasks.release.publish.targets.hub import HubTarget
from mergegate.tasks.release.report import plots
from mergegate.tasks.release.report.content import ReportContent
from mergegate.tasks.release.report.page import render
from mergegate.tasks.release.report.wording import error_rate_note, samples_note


class Layout(NamedTuple):
    """A checkpoint without weights, with its task and library on the Hub."""

    family: str  # ``model_type``, whose configuration transformers generates
    class_name: str
    tag: str | None
    library: str = "transformers"
    tags: tuple[str, ...] = ()
    files: Mapping[str, Any] = {}  # JSON files by name
    settings: Mapping[str, Any] = {}


MODULES = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
PROCESSOR = {"preprocessor_config.json": {}}
ST = "sentence-transformers"


def modules(model_type: str | None) -> dict[str, Any]:
    """Return the files of sentence-transformers. Releases before 5 wrote no ``model_type``."""
    settings = {"model_type": model_type} if model_type else {}
    return {"modules.json": MODULES, "config_sentence_transformers.json": settings}


DENSE = ("sentence-transformers", "sentence-similarity", "feature-extraction")
RERANKER = ("sentence-transformers", "cross-encoder", "reranker")
UNKNOWN = Layout("bert", "OwnModelForEverything", None)

# Tasks as in the documentation of the Hub: https://huggingface.co/docs/hub/models-tasks, the pages of the tasks at
# https://huggingface.co/tasks, and for sentence-transformers the cards that this library writes.
LAYOUTS = {
    "Llama": Layout("llama", "LlamaForCausalLM", "text-generation"),
    "GPT-2 without a class": Layout("gpt2", "", "text-generation"),
    "Qwen2.5-VL": Layout("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "image-text-to-text", files=PROCESSOR),
    "Gemma 3, also a causal model": Layout("gemma3", "Gemma3ForConditionalGeneration", "image-text-to-text"),
    "LLaVA": Layout("llava", "LlavaForConditionalGeneration", "image-text-to-text", files=PROCESSOR),
    "Qwen2-Audio": Layout("qwen2_audio", "Qwen2AudioForConditionalGeneration", "audio-text-to-text"),
    "Qwen2.5-Omni": Layout("qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration", "any-to-any"),
    "Whisper": Layout("whisper", "WhisperForConditionalGeneration", "automatic-speech-recognition", files=PROCESSOR),
    "wav2vec 2.0": Layout("wav2vec2", "Wav2Vec2ForCTC", "automatic-speech-recognition", files=PROCESSOR),
    "T5": Layout("t5", "T5ForConditionalGeneration", "text2text-generation"),
    "BART": Layout("bart", "BartForConditionalGeneration", "text2text-generation"),
    "MiniLM embeddings": Layout("bert", "BertModel", "sentence-similarity", ST, DENSE, modules(None)),
    "Qwen3 embeddings": Layout("qwen3", "Qwen3Model", "sentence-similarity", ST, DENSE, modules("SentenceTransformer")),
    "SPLADE": Layout(
        "bert", "BertForMaskedLM", "feature-extraction", ST, ("sparse-encoder",), modules("SparseEncoder")
    ),
    "reranker": Layout("bert", "BertForSequenceClassification", "text-ranking", ST, RERANKER, modules("CrossEncoder")),
    "older reranker": Layout(
        "bert", "BertForSequenceClassification", "text-ranking", ST, RERANKER,
        settings={"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ),
    "sentiment": Layout("bert", "BertForSequenceClassification", "text-classification"),
    "named entities": Layout("bert", "BertForTokenClassification", "token-classification"),
    "RoBERTa": Layout("roberta", "RobertaForMaskedLM", "fill-mask"),
    "bare BERT": Layout("bert", "BertModel", "feature-extraction"),
    "ViT": Layout("vit", "ViTForImageClassification", "image-classification", files=PROCESSOR),
    "CLIP": Layout("clip", "CLIPModel", "zero-shot-image-classification", files=PROCESSOR),
}  # fmt: skip


def released(root: Path, layout: Layout) -> Publishable:
    """Return an unpublished release of this checkpoint, with one score."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(layout.family, **layout.settings).to_diff_dict()
    config |= {"architectures": [layout.class_name]} if layout.class_name else {}
    files = {"config.json": config, "tokenizer_config.json": {}, **layout.files}
    sample = publishable(root, **{name: json.dumps(value).encode() for name, value in files.items()})
    kind = released_kind(sample.merged.directory, sample.pinned.parents)
    return replace(sample, content=content((share("queries", 30, 40),)).model_copy(update={"kind": kind}))


def release_files(sample: Publishable, judged: ReportContent | None = None, **changes: object) -> dict[str, str]:
    """Return the documents of a release with this content, and with these changes of the content."""
    sample = replace(sample, content=(judged or sample.content).model_copy(update=changes))
    files = sample.parts.files(HubTarget(to="hub", repo="acme/demo"))
    return {file.name: file.read().decode() for file in files if file.name in ("README.md", BOM)}


def model_parameters(bom: str | bytes) -> dict[str, Any]:
    """Return the parameters of the model, which is the first component of a bill of materials."""
    parameters: dict[str, Any] = json.loads(bom)["components"][0]["modelCard"]["modelParameters"]
    return parameters


@pytest.mark.parametrize("name", sampled(LAYOUTS, ["Llama", "LLaVA", "Whisper", "MiniLM embeddings", "older reranker"]))
def test_card_and_bill_of_materials_name_task_and_library(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    files = release_files(released(tmp_path, layout))
    data = ModelCard(files["README.md"]).data
    assert (data.pipeline_tag, data.library_name) == (layout.tag, layout.library)
    assert set(layout.tags) <= set(data.tags)
    assert model_parameters(files["bom.json"])["task"] == layout.tag
    (result,) = data.eval_results
    assert result.task_type == layout.tag


@pytest.mark.proof
@needs_validators
def test_the_bills_of_materials_of_all_kinds_pass_the_official_validator(tmp_path: Path) -> None:
    samples = [released(tmp_path / name, layout) for name, layout in (*LAYOUTS.items(), ("unknown", UNKNOWN))]
    files = [release_files(sample) for sample in samples]
    assert cyclonedx_finds([each[BOM] for each in files]) == [None] * len(files)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("pipeline_tag: robotics", "pipeline_tag: robotics", "robotics"),
        ("pipeline_tag: robotics", "pipeline_tag: text-generation", None),
        ("pipeline_tag: robotics", "license: mit", None),
        ("license: mit", "license: mit", None),
        ("pipeline_tag: [robotics]", "pipeline_tag: [robotics]", None),
        ("pipeline_tag: Not A Tag", "pipeline_tag: Not A Tag", None),
    ],
)
def test_a_model_of_an_unknown_class_has_the_task_on_which_all_parents_agree(
    tmp_path: Path, first: str, second: str, expected: str | None
) -> None:
    sample = released(tmp_path, UNKNOWN)
    for parent, front in zip(sample.pinned.parents, (first, second), strict=True):
        (parent.directory / "README.md").write_text(f"---\n{front}\n---\n# x\n")
    kind = released_kind(sample.merged.directory, sample.pinned.parents)
    files = release_files(sample, kind=kind)
    assert ModelCard(files["README.md"]).data.pipeline_tag == expected
    assert model_parameters(files["bom.json"]).get("task") == expected
    assert "architectures" in files["README.md"].partition("## How to load it")[2].partition("##")[0]


def test_an_adapter_has_the_task_of_its_base_and_the_library_that_loads_it(tmp_path: Path) -> None:
    sample = publishable(tmp_path, **{"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    for parent in sample.pinned.parents:
        (parent.directory / "config.json").write_text('{"architectures": ["WhisperForConditionalGeneration"]}')
    kind = released_kind(sample.merged.directory, sample.pinned.parents)
    judged = content().model_copy(update={"kind": kind})
    metadata = card_metadata(judged, sample.pinned.parents, license_verdict("mit").combination, is_adapter=True)
    assert metadata["pipeline_tag"] == "automatic-speech-recognition"
    assert metadata["library_name"] == "peft"


def test_variants_have_the_task_of_their_merge(tmp_path: Path) -> None:
    parts = variant_parts(tmp_path, MergeRelease("demo", "1", sha("sums"), "acme/demo@1", "acme/demo"), "Q8_0")
    kind = find_kind({"architectures": ["Gemma3ForConditionalGeneration"]}, Companions())
    parts = parts._replace(content=parts.content.model_copy(update={"kind": kind}))
    files = {file.name: file for file in parts.files(HubTarget(to="hub", repo="acme/demo").for_variants("GGUF"))}
    assert ModelCard(files["README.md"].read().decode()).data.pipeline_tag == "image-text-to-text"
    assert model_parameters(files["bom.json"].read())["task"] == "image-text-to-text"


def test_each_task_of_models_that_can_be_evaluated_has_the_name_of_the_hub() -> None:
    tags = {kind.pipeline_tag for kind in class_kinds().values() if kind.task_forms}
    assert tags - {None} <= set(TASK_NAMES)
    # On the Hub, the tag of a task is its name in lower case with hyphens.
    assert all(name.lower().replace(" ", "-") == tag for tag, name in TASK_NAMES.items())


def measured(task: str, metric: str, score: float, stderr: float, *, higher_is_better: bool = True) -> TaskScore:
    metric = f"{metric},none"
    return TaskScore(task=task, metric=metric, n=40, score=score, stderr=stderr, higher_is_better=higher_is_better)


RETRIEVED = (
    measured("queries", "ndcg@10", 0.5, 0.05),
    measured("queries", "recall@5", 0.4, 0.05),
    measured("queries", "mrr", 0.25, 0.05),
)
TRANSCRIBED = (
    measured("calls", "wer", 0.125, 0.01, higher_is_better=False),
    measured("calls", "cer", 0.0625, 0.01, higher_is_better=False),
)


@pytest.mark.parametrize(
    ("name", "scores", "results", "rows"),
    [
        (
            "MiniLM embeddings",
            RETRIEVED,
            {("ndcg_at_10", "nDCG@10", 50.0), ("recall_at_5", "recall@5", 40.0), ("mrr", "MRR", 25.0)},
            ["| queries | nDCG@10 | 40 |", "| queries | MRR | 40 |"],
        ),
        (
            "Whisper",
            TRANSCRIBED,
            {("wer", "word error rate", 12.5), ("cer", "character error rate", 6.25)},
            ["| calls | word error rate (lower is better) | 40 | 12.5 \\[10.5, 14.5\\] |"],
        ),
    ],
)
def test_metrics_have_the_types_of_the_hub_and_names_for_people(
    tmp_path: Path, name: str, scores: tuple[TaskScore, ...], results: set[tuple[str, str, float]], rows: list[str]
) -> None:
    sample = released(tmp_path, LAYOUTS[name])
    card = release_files(sample, content(scores), kind=sample.content.kind)["README.md"]
    found = ModelCard(card).data.eval_results
    assert {(result.metric_type, result.metric_name, result.metric_value) for result in found} == results
    assert all(row in card for row in rows)


def test_the_metrics_of_a_text_generator_keep_the_labels_of_lm_eval(tmp_path: Path) -> None:
    assert "| queries | mrr,none | 40 |" in release_files(publishable(tmp_path), content(RETRIEVED))["README.md"]


# Class that each snippet must load, by the name of the tiny model.
LOADED = {
    "text generator": "LlamaForCausalLM", "bert embedding": "SentenceTransformer",
    "qwen3 embedding": "SentenceTransformer", "sparse encoder": "SparseEncoder", "cross-encoder": "CrossEncoder",
    "older cross-encoder": "CrossEncoder", "reranker without modules": "CrossEncoder",
    "llava": "LlavaForConditionalGeneration", "gemma3": "Gemma3ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration", "wav2vec2": "Wav2Vec2ForCTC",
    "audio language model": "Qwen2AudioForConditionalGeneration", "t5": "T5ForConditionalGeneration",
    "sequence classifier": "BertForSequenceClassification", "token classifier": "BertForTokenClassification",
    "masked language model": "BertForMaskedLM", "bare encoder": "BertModel", "clip": "CLIPModel",
}  # fmt: skip


def run_snippet(kind: ModelKind, directory: Path, *, is_adapter: bool) -> dict[str, Any]:
    """Run the code of the card in the directory of the release, and return its variables."""
    files = [file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()]
    variables: dict[str, Any] = {}
    with chdir(directory):
        exec(loading_code(kind, ".", files, is_adapter=is_adapter), variables)
    return variables


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.story if name in ("text generator", "whisper", "clip") else pytest.mark.proof
        )
        for name in LOADED
    ],
)
def test_the_code_in_the_card_loads_the_release(tmp_path: Path, name: str) -> None:
    from tiny_kinds import WORDS, write

    directory = write(name, tmp_path / "model")
    variables = run_snippet(kind_of_directory(directory), directory, is_adapter=False)
    assert type(variables["model"]).__name__ == LOADED[name]
    if name in ("llava", "gemma3", "whisper", "wav2vec2", "audio language model", "clip"):
        assert type(variables["processor"]).__name__.endswith("Processor")
    elif kind_of_directory(directory).loader.startswith("Auto"):
        assert len(variables["tokenizer"]) > len(WORDS)


ADAPTED = [("text generator", "q_proj", "CAUSAL_LM"), ("t5", "q", "SEQ_2_SEQ_LM"), ("llava", "q_proj", None)]
ADAPTED += [(name, "query", "FEATURE_EXTRACTION") for name in ("bare encoder", "bert embedding")]
ADAPTED += [(name, "query", None) for name in ("sparse encoder", "cross-encoder", "sequence classifier")]


@pytest.mark.story
@pytest.mark.parametrize(("name", "module", "task"), sampled_rows(ADAPTED, ADAPTED[:2], pytest.mark.proof))
def test_the_code_in_the_card_loads_an_adapter_of_the_base_model(
    tmp_path: Path, name: str, module: str, task: str | None
) -> None:
    """PEFT writes the adapter, with the task that mergegate gives the adapters it writes."""
    import transformers
    from peft import LoraConfig, get_peft_model
    from tiny_kinds import write

    base = write(name, tmp_path / "base")
    kind, checkpoint = kind_of_directory(base), open_checkpoint(base)
    assert task_type(checkpoint) == task
    config = LoraConfig(r=2, target_modules=[module], init_lora_weights=False, task_type=task)
    network = getattr(transformers, checkpoint.config["architectures"][0]).from_pretrained(base)
    get_peft_model(network, config).save_pretrained(tmp_path / "adapter")
    model = run_snippet(kind, tmp_path / "adapter", is_adapter=True)["model"]
    assert any("lora_B" in parameter and bool(value.any()) for parameter, value in model.named_parameters())


def test_the_card_says_that_only_text_was_tested(tmp_path: Path) -> None:
    sample = released(tmp_path, LAYOUTS["LLaVA"])
    note = describe_untested(sample.content.kind, ["text"])
    finding = GateFinding(kind="untested", outcome="pass", reason=note)
    verdict = sample.content.verdict.model_copy(update={"findings": (finding,)})
    card = release_files(sample, verdict=verdict)["README.md"]
    sentence = "Only text was tested: no task tests how the merge reads pictures."
    evaluation, _, limits = card.partition("## Evaluation")[2].partition("## Limits")
    assert f"**Not tested.** {sentence}" in evaluation
    assert f"* {sentence}" in limits.partition("##")[0]


@pytest.mark.parametrize(
    ("name", "words", "absent"),
    [
        ("Llama", "Documents on which", "rank"),
        ("MiniLM embeddings", "the text that each model ranks first", "few-shot"),
        ("reranker", "the text that each model ranks first", "few-shot"),
        ("Whisper", "the transcript of each model", "few-shot"),
    ],
)
def test_the_report_describes_samples_and_evaluation_in_the_terms_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str, absent: str
) -> None:
    judged = released(tmp_path, LAYOUTS[name]).content
    assert words in samples_note(judged)
    assert absent not in samples_note(judged).lower()
    monkeypatch.setattr(plots, "draw_intervals", lambda *_, **__: ())
    page = render(judged)
    assert ("lm-eval, hf backend" in page) == (name == "Llama")
    assert ("no chat template" in page) == (name == "Llama")


def test_the_drop_of_an_error_rate_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = released(tmp_path, LAYOUTS["Whisper"])
    guard = verdict_of(3, 2, 200).model_copy(update={"task": "calls", "metric": "wer,none"})
    verdict = sample.content.verdict.model_copy(update={"guards": (guard,)})
    note = "An error rate must not rise: its drop is the rate of the merge minus the rate of the reference."
    assert note in release_files(sample, verdict=verdict)["README.md"]
    monkeypatch.setattr(plots, "draw_intervals", lambda *_, **__: ())
    assert note in render(sample.content.model_copy(update={"verdict": verdict}))
    assert error_rate_note(verdict, TEXT_GENERATOR) == ""
