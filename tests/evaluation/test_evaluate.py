"""Scoring with lm-eval is correct per document, avoids its known pitfalls, and leaves no output or files behind."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval_runs import simple_evaluate
from pydantic import ValidationError
from tiny_models import Prefix, make_model, words, write_choices, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.checkpoints.model_cache import unload_models
from mergegate.tasks.evaluation import document_scores
from mergegate.tasks.evaluation.document_order import DocumentRange
from mergegate.tasks.evaluation.document_scores import DocumentScore
from mergegate.tasks.evaluation.harness import ScoringJob, score_documents
from mergegate.tasks.evaluation.metrics import default_metric
from mergegate.tasks.evaluation.settings import Scoring
from mergegate.tasks.evaluation.stage import score_table
from mergegate.tasks.evaluation.task_definition import EvalTask, pin_task
from mergegate.tasks.evaluation.task_loading import inspect_data
from mergegate.tasks.gate.settings import EvaluateSettings, Guard


@pytest.fixture(autouse=True)
def nothing_stays_in_memory() -> Iterator[None]:
    yield
    unload_models()


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_model(tmp_path / "model")


def pin(path: Path) -> EvalTask:
    return pin_task(path.name, path.parent, HashMemo(path.parent / "hashes.db"))


@pytest.fixture
def task(tmp_path: Path) -> EvalTask:
    return pin(write_choices(tmp_path / "tasks"))


def measure(
    model: Model, task: EvalTask, *, part: tuple[int, int] | None = None, **scoring: object
) -> tuple[DocumentScore, ...]:
    """Score all documents, or one part, in this process under lm-eval's own metrics."""
    first, last = part or (0, inspect_data(task).documents)
    settings = Scoring.model_validate(scoring)
    scored = score_documents(
        ScoringJob(model, task, settings, DocumentRange(first=first, last=last), "cpu"), lambda done, total: None
    )
    return tuple(row for row in scored if row.metric != "prob,none")


def documents_of(task: EvalTask) -> list[dict[str, Any]]:
    assert task.definition is not None
    lines = (task.definition.parent / "data" / f"{task.name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def reference_choices(model: Model, document: dict[str, Any], bos: int | None) -> list[float]:
    """Return the log-likelihood of each choice from plain transformers, with log-softmax in float64."""
    network = AutoModelForCausalLM.from_pretrained(model.directory, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    found = []
    for choice in document["choices"]:
        before, after = (tokenizer(text, add_special_tokens=False).input_ids for text in (document["word"], choice))
        before = before if bos is None else [bos, *before]
        with torch.no_grad():
            logits = network(torch.tensor([before + after])).logits[0].double()
        log_p = torch.log_softmax(logits, -1)
        found.append(sum(float(log_p[len(before) - 1 + i, token]) for i, token in enumerate(after)))
    return found


@pytest.mark.story
@pytest.mark.parametrize("prefix", ["bos added by the tokenizer", "eos only"])
def test_every_document_is_scored_as_plain_transformers_do(tmp_path: Path, task: EvalTask, prefix: Prefix) -> None:
    model = make_model(tmp_path / "m", prefix=prefix)
    found = measure(model, task)
    wanted = []
    for document in documents_of(task):
        logliks = reference_choices(model, document, 1 if prefix == "bos added by the tokenizer" else None)
        wanted.append(float(max(range(2), key=logliks.__getitem__) == document["right"]))
    assert 0.2 < sum(wanted) / len(wanted) < 0.8  # mixed outcomes, so the test can fail
    assert [o.outcome for o in found] == wanted
    (total,) = score_table("letters", found)
    assert (total.task, total.metric, total.n) == ("letters", "acc,none", 40)
    assert total.score == pytest.approx(sum(wanted) / 40)
    p = total.score
    assert total.stderr == pytest.approx(math.sqrt(p * (1 - p) / 39))


def test_a_bf16_model_is_scored_in_float32_with_one_begin_of_text(
    tmp_path: Path, task: EvalTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference starts from the bfloat16 logits that were scored.

    Whether a bfloat16 product of another shape is rounded in the same way depends on the processor and says nothing
    about how mergegate processes the logits.
    """
    from lm_eval.models.huggingface import HFLM

    said: list[tuple[float, bool]] = []
    logits_of: dict[tuple[int, ...], torch.Tensor] = {}
    original, forward = HFLM.loglikelihood, LlamaForCausalLM.forward

    def listen(self: HFLM, *args: Any, **kwargs: Any) -> Any:
        said.extend(original(self, *args, **kwargs))
        return said

    def watch(self: LlamaForCausalLM, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = forward(self, input_ids=input_ids, **kwargs)
        if (sees := kwargs.get("attention_mask")) is not None:  # packed rows: each position attends to its own past
            for place, logits in zip(kwargs["logits_to_keep"].tolist(), output.logits[0], strict=True):
                logits_of[tuple(input_ids[0][sees[0, 0, place] == 0].tolist())] = logits.detach().clone()
        return output

    monkeypatch.setattr(HFLM, "loglikelihood", listen)
    model = make_model(tmp_path / "m", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", watch)
        found = measure(model, task, batch_size=1, part=(0, 6))
    by_id = documents_of(task)
    chosen = [by_id[o.doc_id] for o in found]
    wanted = []
    for document in chosen:
        prompt = [1, *tokenizer(document["word"], add_special_tokens=False).input_ids]
        logits = logits_of[tuple(prompt)]  # every prompt has one BOS token, and no other prompt was scored
        assert logits.dtype == torch.bfloat16
        log_p = torch.log_softmax(logits.double(), -1)
        wanted += [float(log_p[tokenizer.convert_tokens_to_ids(choice)]) for choice in document["choices"]]
    asked = [prompt for prompt in logits_of if prompt[0] == 1]  # the rest probe the network's inputs
    assert len(asked) == len({document["word"] for document in chosen})
    assert [loglik for loglik, _ in said] == pytest.approx(wanted, abs=1e-4)  # bf16 steps are 0.01 or more here
    plain = [loglik for document in chosen for loglik in reference_choices(model, document, 1)]
    assert wanted == pytest.approx(plain, abs=2**-5)  # two bfloat16 steps of a logit between 2 and 4


def test_a_prompt_that_begins_with_begin_of_text_is_not_given_another(
    tmp_path: Path, task: EvalTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template that adds only BOS must yield the prompt that mergegate builds without a template."""
    from lm_eval.models.huggingface import HFLM

    runs: list[list[tuple[float, bool]]] = []
    original = HFLM.loglikelihood

    def listen(self: HFLM, *args: Any, **kwargs: Any) -> Any:
        runs.append(original(self, *args, **kwargs))
        return runs[-1]

    monkeypatch.setattr(HFLM, "loglikelihood", listen)
    model = make_model(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(model.directory)
    plain, chat = (measure(model, task, chat_template=template, part=(0, 6)) for template in (False, True))
    assert [loglik for loglik, _ in runs[1]] == pytest.approx([loglik for loglik, _ in runs[0]], abs=1e-6)
    assert not {o.prompt_hash for o in plain} & {o.prompt_hash for o in chat}  # so the gate cannot pair them


@pytest.mark.story
def test_answers_of_two_models_are_never_mixed(tmp_path: Path, task: EvalTask) -> None:
    models = [make_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1)]
    scored = [[o.outcome for o in measure(models[which], task)] for which in (0, 1, 0, 1)]
    assert scored[0] == scored[2] != scored[1] == scored[3]
    for model, found in zip(models, scored, strict=False):
        wanted = [reference_choices(model, document, 1) for document in documents_of(task)]
        rights = [document["right"] for document in documents_of(task)]
        assert found == [
            float(max((0, 1), key=w.__getitem__) == right) for w, right in zip(wanted, rights, strict=True)
        ]


def test_parts_are_fixed_scattered_and_make_up_the_whole(model: Model, task: EvalTask) -> None:
    every = measure(model, task)
    parts = [measure(model, task, part=part) for part in ((0, 5), (5, 15), (15, 40))]
    assert [len(part) for part in parts] == [5, 10, 25]
    assert sorted(o for part in parts for o in part) == sorted(every)  # ids, hashes and scores match the full run
    assert measure(model, task, part=(0, 5)) == parts[0]
    assert {o.doc_id for o in measure(model, task, part=(0, 5), seed=1)} != {o.doc_id for o in parts[0]}
    assert {o.doc_id for o in parts[0]} != set(range(5))


def test_few_shot_prompts_do_not_depend_on_the_part(tmp_path: Path, model: Model) -> None:
    task = pin(write_choices(tmp_path / "tasks", extra="fewshot_split: test\n"))
    every = measure(model, task, num_fewshot=2)
    parts = [measure(model, task, num_fewshot=2, part=part) for part in ((20, 40), (0, 20))]
    assert sorted(o for part in parts for o in part) == sorted(every)


def test_more_examples_than_there_are_documents_are_refused(tmp_path: Path, model: Model) -> None:
    task = pin(write_choices(tmp_path / "tasks", n=5, extra="fewshot_split: test\n"))
    with pytest.raises(InvalidInput, match="but the task has fewer"):
        measure(model, task, num_fewshot=7)


def test_prompts_are_those_of_lm_evals_own_command_line(tmp_path: Path, model: Model) -> None:
    from lm_eval.tasks import TaskManager

    directory = tmp_path / "tasks"
    path = write_choices(directory, extra="fewshot_split: test\n")
    plain = path.read_text().replace("data/letters.jsonl", f"{directory}/data/letters.jsonl")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "letters.yaml").write_text(plain)
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model.directory)},
        tasks=["letters"],
        task_manager=TaskManager(include_path=str(tmp_path / "plain"), include_defaults=False),
        num_fewshot=2,
        device="cpu",
        bootstrap_iters=0,
    )
    wanted = {sample["doc_id"]: sample["prompt_hash"] for sample in results["samples"]["letters"]}
    assert {
        o.doc_id: o.prompt_hash for o in measure(model, pin(path), num_fewshot=2, part=(0, 10))
    }.items() < wanted.items()


def test_a_part_beyond_the_data_is_refused_because_they_changed(model: Model, task: EvalTask) -> None:
    with pytest.raises(InvalidInput, match="1 documents"):
        measure(model, task, part=(39, 60))


def test_cluster_names_come_from_a_field_of_the_document(model: Model, task: EvalTask) -> None:
    found = measure(model, task.model_copy(update={"cluster_field": "right"}))
    rights = [str(document["right"]) for document in documents_of(task)]
    assert [o.cluster for o in found] == [rights[o.doc_id] for o in found]
    assert {o.cluster for o in measure(model, task)} == {""}
    with pytest.raises(InvalidInput, match="did you mean 'right'"):
        measure(model, task.model_copy(update={"cluster_field": "rigth"}))


def test_changed_data_are_seen_even_under_an_old_time_stamp(tmp_path: Path, model: Model) -> None:
    path = write_choices(tmp_path / "tasks")
    data = tmp_path / "tasks" / "data" / "letters.jsonl"
    before = measure(model, pin(path))
    stamp = data.stat()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    write_jsonl(data, ({**row, "right": 1 - row["right"]} for row in rows))
    os.utime(data, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert data.stat().st_size == stamp.st_size
    task = pin_task(path.name, path.parent, HashMemo(tmp_path / "fresh.db"))
    after = measure(model, task)
    assert [1 - o.outcome for o in after] == [o.outcome for o in before]


def test_data_that_change_after_they_were_pinned_are_noticed(tmp_path: Path, model: Model, task: EvalTask) -> None:
    (tmp_path / "tasks" / "data" / "letters.jsonl").write_text('{"word": "a", "right": 0, "choices": ["a", "b"]}\n')
    with pytest.raises(InvalidInput, match="a file that changed during the run"):
        measure(model, task)


def test_progress_is_reported_up_to_the_last_request(model: Model, task: EvalTask) -> None:
    told: list[tuple[int, int]] = []
    whole = DocumentRange(first=0, last=40)
    score_documents(
        ScoringJob(model, task, Scoring(batch_size=8), whole, "cpu"), lambda done, total: told.append((done, total))
    )
    assert told[-1] == (80, 80)  # two choices per document
    assert told == sorted(told)


def test_few_shot_examples_change_the_prompts_and_their_hashes(tmp_path: Path, model: Model) -> None:
    task = pin(write_choices(tmp_path / "tasks", extra="fewshot_split: test\n"))
    plain, shot = (measure(model, task, num_fewshot=n, part=(0, 5)) for n in (0, 2))
    assert [o.doc_hash for o in plain] == [o.doc_hash for o in shot]
    assert not {o.prompt_hash for o in plain} & {o.prompt_hash for o in shot}
    with pytest.raises(InvalidInput, match="a different prompt on each side"):
        document_scores.pair_documents(plain, shot, "acc,none", "letters")


def test_few_shot_examples_are_drawn_alike_for_every_model_and_follow_the_seed(tmp_path: Path, model: Model) -> None:
    task = pin(write_choices(tmp_path / "tasks", extra="fewshot_split: test\n"))
    merge = make_model(tmp_path / "merge", seed=1)
    runs = [(model, 0), (merge, 0), (merge, 1)]
    prompts = [[o.prompt_hash for o in measure(who, task, num_fewshot=2, seed=seed)] for who, seed in runs]
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_perplexity_task_is_refused_with_a_remedy(tmp_path: Path, model: Model) -> None:
    write_jsonl(tmp_path / "t.jsonl", ({"text": word} for word in words(5)))
    (tmp_path / "t.yaml").write_text(
        "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: t.jsonl}}\ntest_split: test\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n"
    )
    with pytest.raises(InvalidInput, match="under 'perplexity:'"):
        measure(model, pin(tmp_path / "t.yaml"))


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [("test_split: gone\n", "cannot be loaded"), ("doc_to_text: '{{ word | nonsense }}'\n", "cannot be loaded")],
)
def test_a_definition_that_does_not_fit_its_data_is_refused(
    tmp_path: Path, model: Model, extra: str, complaint: str
) -> None:
    write_choices(tmp_path / "tasks", name="base")
    (tmp_path / "tasks" / "t.yaml").write_text(f"include: base.yaml\ntask: t\n{extra}")
    with pytest.raises(InvalidInput, match=complaint) as caught:
        measure(model, pin(tmp_path / "tasks" / "t.yaml"))
    assert "t.yaml" in caught.value.where


def test_a_missing_chat_template_is_refused(tmp_path: Path, model: Model, task: EvalTask) -> None:
    with pytest.raises(InvalidInput, match="has no chat template"):
        measure(model, task, chat_template=True)


def test_settings_are_written_as_in_the_design() -> None:
    settings = EvaluateSettings.model_validate(
        {
            "tasks": [
                {"task": "mmlu", "guarded_by": "general", "max_drop": 2},
                {"task": "gsm8k", "guarded_by": "math", "max_drop": 3, "metric": "exact_match,flexible-extract"},
            ],
            "dtype": "bfloat16",
            "documents": 500,
            "confidence": 0.9,
        }
    )
    assert settings.scoring == Scoring(dtype="bfloat16", documents=500)
    assert type(settings.scoring) is Scoring  # a threshold must not affect the key of an evaluation
    assert (settings.gate_rule.confidence, settings.gate_rule.on_inconclusive) == (0.9, "block")
    assert [guard.upper_limit for guard in settings.tasks] == [3, 4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tasks": []},
        {"tasks": [{"task": "mmlu"}]},
        {"tasks": [{"task": "mmlu", "guarded_by": "a", "max_drop": -1}]},
        {"tasks": [{"task": "mmlu", "guarded_by": "a", "max_drop": 3, "margin": 2}]},
        {"tasks": [{"task": "mmlu", "guarded_by": "a", "max_dorp": 3}]},
        {"tasks": [{"task": "mmlu", "guarded_by": "a"}], "confidence": 95},
        {"tasks": [{"task": "mmlu", "guarded_by": "a"}], "on_inconclusive": "ignore"},
    ],
)
def test_contradictory_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EvaluateSettings.model_validate(wrong)


def test_a_guard_allows_two_points_and_must_rule_out_three() -> None:
    guard = Guard(task="mmlu", guarded_by="general")
    assert (guard.max_drop, guard.upper_limit) == (2, 3)


@pytest.mark.parametrize(
    ("metrics", "chosen"),
    [
        (("acc_norm,none", "acc,none"), "acc,none"),
        (("exact_match,strict-match", "exact_match,flexible-extract"), "exact_match,flexible-extract"),
        (("rouge,none", "bleu,none"), "rouge,none"),
    ],
)
def test_without_a_metric_the_lenient_one_is_judged(metrics: tuple[str, ...], chosen: str) -> None:
    assert default_metric(metrics) == chosen
