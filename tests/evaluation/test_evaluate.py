"""Scoring with lm-eval is correct per document, avoids its known pitfalls, and leaves no output or files behind."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from scoring_runs import model_in, pin, score, without_probability, write_task
from tiny_models import Prefix, make_model, write_choices, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask, pin_task
from mergegate.tasks.quality.evaluation.scoring import document_scores
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.metrics import default_metric
from mergegate.tasks.quality.evaluation.scoring.scores import score_table
from mergegate.tasks.quality.evaluation.settings import Scoring
from mergegate.tasks.quality.gate.settings import EvaluateSettings, Guard


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the tasks ``letters`` and ``shot``, which draws few-shot examples, and the model ``model``."""
    root = tmp_path_factory.mktemp("evaluate")
    write_choices(root)
    write_choices(root, name="shot", extra="fewshot_split: test\n")
    make_model(root / "model")
    yield root
    unload_models()


@pytest.fixture(scope="module")
def model(root: Path) -> Model:
    return model_in(root / "model", "model")


@pytest.fixture(scope="module")
def task(root: Path) -> EvalTask:
    return pin(root / "letters.yaml")


@pytest.fixture(scope="module")
def shot(root: Path) -> EvalTask:
    return pin(root / "shot.yaml")


def measure(
    model: Model, task: EvalTask, part: tuple[int, int] | None = None, **scoring: object
) -> tuple[DocumentScore, ...]:
    """Score all documents, or one part, under lm-eval's own metrics."""
    return without_probability(score(model, task, part, **scoring))


def documents_of(task: EvalTask) -> list[dict[str, Any]]:
    assert task.definition is not None
    lines = (task.definition.parent / "data" / f"{task.name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@cache
def plain_model(directory: Path) -> tuple[Any, Any]:
    network = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return network, AutoTokenizer.from_pretrained(directory)


def reference_choices(model: Model, document: dict[str, Any], bos: int | None) -> list[float]:
    """Return the log-likelihood of each choice from plain transformers, with log-softmax in float64."""
    network, tokenizer = plain_model(model.directory)
    found = []
    for choice in document["choices"]:
        before, after = (tokenizer(text, add_special_tokens=False).input_ids for text in (document["word"], choice))
        before = before if bos is None else [bos, *before]
        with torch.no_grad():
            logits = network(torch.tensor([before + after])).logits[0].double()
        log_p = torch.log_softmax(logits, -1)
        found.append(sum(float(log_p[len(before) - 1 + i, token]) for i, token in enumerate(after)))
    return found


def outcomes_by_hand(model: Model, task: EvalTask, bos: int | None) -> list[float]:
    return [
        float(max((0, 1), key=reference_choices(model, document, bos).__getitem__) == document["right"])
        for document in documents_of(task)
    ]


@pytest.mark.story
@pytest.mark.parametrize("prefix", ["bos added by the tokenizer", "eos only"])
def test_every_document_is_scored_as_plain_transformers_do(tmp_path: Path, task: EvalTask, prefix: Prefix) -> None:
    model = make_model(tmp_path / "m", prefix=prefix)
    found = measure(model, task)
    wanted = outcomes_by_hand(model, task, 1 if prefix == "bos added by the tokenizer" else None)
    assert 0.2 < sum(wanted) / len(wanted) < 0.8  # mixed outcomes, so the test can fail
    assert [o.outcome for o in found] == wanted
    (total,) = score_table("letters", found)
    assert (total.task, total.metric, total.n) == ("letters", "acc,none", 40)
    p = total.score
    assert p == pytest.approx(sum(wanted) / 40)
    assert total.stderr == pytest.approx(math.sqrt(p * (1 - p) / 39))


def record_likelihoods(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Record the likelihoods that lm-eval's model returns, one list per run."""
    from lm_eval.models.huggingface import HFLM

    runs: list[list[float]] = []
    original = HFLM.loglikelihood

    def listen(self: HFLM, *args: Any, **kwargs: Any) -> Any:
        answers = original(self, *args, **kwargs)
        runs.append([likelihood for likelihood, _ in answers])
        return answers

    monkeypatch.setattr(HFLM, "loglikelihood", listen)
    return runs


def test_a_bf16_model_is_scored_in_float32_with_one_begin_of_text(
    tmp_path: Path, task: EvalTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference starts from the bfloat16 logits that were scored.

    Whether a bfloat16 product of another shape is rounded in the same way depends on the processor and says nothing
    about how mergegate processes the logits.
    """
    logits_of: dict[tuple[int, ...], torch.Tensor] = {}
    forward = LlamaForCausalLM.forward

    def watch(self: LlamaForCausalLM, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = forward(self, input_ids=input_ids, **kwargs)
        if (sees := kwargs.get("attention_mask")) is not None:  # packed rows: each position attends to its own past
            for place, logits in zip(kwargs["logits_to_keep"].tolist(), output.logits[0], strict=True):
                logits_of[tuple(input_ids[0][sees[0, 0, place] == 0].tolist())] = logits.detach().clone()
        return output

    runs = record_likelihoods(monkeypatch)
    model = make_model(tmp_path / "m", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", watch)
        found = measure(model, task, (0, 6), batch_size=1)
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
    assert runs == [pytest.approx(wanted, abs=1e-4)]  # bf16 steps are 0.01 or more here
    plain = [loglik for document in chosen for loglik in reference_choices(model, document, 1)]
    assert wanted == pytest.approx(plain, abs=2**-5)  # two bfloat16 steps of a logit between 2 and 4


def test_a_prompt_that_begins_with_begin_of_text_is_not_given_another(
    tmp_path: Path, task: EvalTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template that adds only BOS must yield the prompt that mergegate builds without a template."""
    runs, model = record_likelihoods(monkeypatch), make_model(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(model.directory)
    plain, chat = (measure(model, task, (0, 6), chat_template=template) for template in (False, True))
    assert runs[1] == pytest.approx(runs[0], abs=1e-6)
    assert not {o.prompt_hash for o in plain} & {o.prompt_hash for o in chat}  # so the gate cannot pair them


@pytest.mark.story
def test_answers_of_two_models_are_never_mixed(tmp_path: Path, task: EvalTask) -> None:
    models = [make_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1)]
    scored = [[o.outcome for o in measure(models[which], task)] for which in (0, 1, 0, 1)]
    assert scored[0] == scored[2] != scored[1] == scored[3]
    assert scored[:2] == [outcomes_by_hand(model, task, 1) for model in models]


def test_parts_are_fixed_scattered_and_make_up_the_whole(model: Model, task: EvalTask) -> None:
    every = measure(model, task)
    parts = [measure(model, task, part) for part in ((0, 5), (5, 15), (15, 40))]
    assert [len(part) for part in parts] == [5, 10, 25]
    assert sorted(o for part in parts for o in part) == sorted(every)  # ids, hashes and scores match the full run
    assert measure(model, task, (0, 5)) == parts[0]
    assert {o.doc_id for o in measure(model, task, (0, 5), seed=1)} != {o.doc_id for o in parts[0]}
    assert {o.doc_id for o in parts[0]} != set(range(5))


def test_few_shot_prompts_do_not_depend_on_the_part(model: Model, shot: EvalTask) -> None:
    parts = [measure(model, shot, part, num_fewshot=2) for part in ((20, 40), (0, 20))]
    assert sorted(o for part in parts for o in part) == sorted(measure(model, shot, num_fewshot=2))


@pytest.mark.parametrize(
    ("part", "scoring", "complaint"),
    [
        ((0, 5), {"num_fewshot": 41}, "but the task has fewer"),
        ((39, 60), {}, "1 documents"),  # the data have changed
        (None, {"chat_template": True}, "has no chat template"),
    ],
)
def test_what_the_data_or_the_model_lack_is_refused(
    model: Model, shot: EvalTask, part: tuple[int, int] | None, scoring: dict[str, object], complaint: str
) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        measure(model, shot, part, **scoring)


def test_cluster_names_come_from_a_field_of_the_document(model: Model, task: EvalTask, root: Path) -> None:
    found = measure(model, pin(root / "letters.yaml", cluster_field="right"))
    rights = [str(document["right"]) for document in documents_of(task)]
    assert [o.cluster for o in found] == [rights[o.doc_id] for o in found]
    assert {o.cluster for o in measure(model, task)} == {""}
    with pytest.raises(InvalidInput, match="did you mean 'right'"):
        measure(model, pin(root / "letters.yaml", cluster_field="rigth"))


def test_changed_data_are_seen_even_under_an_old_time_stamp(tmp_path: Path, model: Model) -> None:
    path = write_choices(tmp_path)
    data = tmp_path / "data" / "letters.jsonl"
    task = pin(path)
    before = measure(model, task)
    stamp = data.stat()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    write_jsonl(data, ({**row, "right": 1 - row["right"]} for row in rows))
    os.utime(data, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert data.stat().st_size == stamp.st_size
    after = measure(model, pin_task(path.name, path.parent, HashMemo(tmp_path / "fresh.db")))
    assert [1 - o.outcome for o in after] == [o.outcome for o in before]
    data.write_text('{"word": "a", "right": 0, "choices": ["a", "b"]}\n')
    with pytest.raises(InvalidInput, match="a file that changed during the run"):
        measure(model, task)


def test_few_shot_examples_change_the_prompts_and_their_hashes(model: Model, shot: EvalTask) -> None:
    plain, examples = (measure(model, shot, (0, 5), num_fewshot=n) for n in (0, 2))
    assert [o.doc_hash for o in plain] == [o.doc_hash for o in examples]
    assert not {o.prompt_hash for o in plain} & {o.prompt_hash for o in examples}
    with pytest.raises(InvalidInput, match="a different prompt on each side"):
        document_scores.pair_documents(plain, examples, "acc,none", "letters")


def test_few_shot_examples_are_drawn_alike_for_every_model_and_follow_the_seed(
    tmp_path: Path, model: Model, shot: EvalTask
) -> None:
    merge = make_model(tmp_path / "merge", seed=1)
    runs = [(model, 0), (merge, 0), (merge, 1)]
    prompts = [[o.prompt_hash for o in measure(who, shot, (0, 20), num_fewshot=2, seed=seed)] for who, seed in runs]
    assert prompts[0] == prompts[1]
    assert prompts[1] != prompts[2]


@pytest.mark.parametrize("extra", [{"test_split": "gone"}, {"doc_to_text": "{{ word | nonsense }}"}])
def test_a_definition_that_does_not_fit_its_data_is_refused(
    tmp_path: Path, model: Model, extra: dict[str, str]
) -> None:
    write_choices(tmp_path, name="base")
    with pytest.raises(InvalidInput, match="cannot be loaded") as caught:
        measure(model, pin(write_task(tmp_path, "t", include="base.yaml", **extra)))
    assert "t.yaml" in caught.value.where


def test_settings_are_written_as_in_the_design() -> None:
    tasks = [
        {"task": "mmlu", "guarded_by": "general", "max_drop": 2},
        {"task": "gsm8k", "guarded_by": "math", "max_drop": 3, "metric": "exact_match,flexible-extract"},
    ]
    settings = EvaluateSettings(tasks=tasks, dtype="bfloat16", documents=500, confidence=0.9)
    assert settings.scoring == Scoring(dtype="bfloat16", documents=500)
    assert type(settings.scoring) is Scoring  # a threshold must not affect the key of an evaluation
    assert (settings.gate_rule.confidence, settings.gate_rule.on_inconclusive) == (0.9, "block")
    assert [guard.upper_limit for guard in settings.tasks] == [3, 4]
    guard = Guard(task="mmlu", guarded_by="general")
    assert (guard.max_drop, guard.upper_limit) == (2, 3)


@pytest.mark.parametrize(
    ("guard", "more"),
    [
        (None, {}), ({}, {}), ({"guarded_by": "a", "max_drop": -1}, {}),
        ({"guarded_by": "a", "max_drop": 3, "margin": 2}, {}), ({"guarded_by": "a", "max_dorp": 3}, {}),
        ({"guarded_by": "a"}, {"confidence": 95}), ({"guarded_by": "a"}, {"on_inconclusive": "ignore"}),
    ],
)  # fmt: skip
def test_contradictory_settings_are_refused(guard: dict[str, object] | None, more: dict[str, object]) -> None:
    tasks = [] if guard is None else [{"task": "mmlu", **guard}]
    EvaluateSettings.model_validate({"tasks": [{"task": "mmlu", "guarded_by": "a"}]})
    with pytest.raises(ValidationError):
        EvaluateSettings.model_validate({"tasks": tasks, **more})


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
