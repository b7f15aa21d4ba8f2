"""Encoder-decoders answer as in lm-eval, whatever else is in the batch, and their merges equal those in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval_runs import run_lm_eval
from samples import sampled, sampled_rows
from scoring_runs import mean_of, model_in, pin, quiet, scoring_job, write_task
from tiny_kinds import write
from tone_speech import teach

from mergegate.flows.preflight import kind_demands
from mergegate.flows.profile import load_profile
from mergegate.merge_core.architecture import TEXT_GENERATOR, find_kind
from mergegate.merge_core.checkpoint import Companions
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JournalLocation
from mergegate.tasks.models.checkpoints import LoadedModel, load_model, unload_models
from mergegate.tasks.preflight import kind_findings
from mergegate.tasks.quality.evaluation.backends.hf import wrap_model
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.scoring.harness import LongerAnswers, ScoringJob, score_documents
from mergegate.tasks.quality.evaluation.settings import Scoring

FAMILIES, KINDS = ("t5", "bart"), ("chosen", "generated")
COUNT = 12


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("t5", tmp_path_factory.mktemp("models") / "t5")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write("bart", tmp_path_factory.mktemp("models") / "bart")
    unload_models()


@pytest.fixture(params=FAMILIES)
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    directory = request.getfixturevalue(request.param)
    with load_model(model_in(directory), dtype="auto", device="cpu") as loaded_model:
        yield loaded_model


def prompts(longest: int = 50) -> list[str]:
    rng = random.Random(1)
    return ["".join(rng.choices("abcdef ", k=rng.randrange(1, longest))).strip() or "a" for _ in range(COUNT)]


def rated() -> list[Instance]:
    rng = random.Random(2)
    answers = ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(COUNT)]
    return [Instance("loglikelihood", {}, pair, 0) for pair in zip(prompts(), answers, strict=True)]


def written(budget: int, texts: Sequence[str] = (), **settings: Any) -> list[Instance]:
    settings = {"until": ["\n"], "max_gen_toks": budget, **settings}
    return [Instance("generate_until", {}, (prompt, settings), 0) for prompt in texts or prompts()]


def reference(loaded_model: LoadedModel) -> HFLM:
    """lm-eval's own ``LM``, with one request at a time, so that nothing is padded."""
    options: dict[str, Any] = {"backend": "seq2seq", "softmax_dtype": "float32", "batch_size": 1}
    return HFLM(pretrained=loaded_model.network, tokenizer=loaded_model.tokenizer, **options)


@pytest.mark.parametrize("batch_size", sampled((1, 5), (5,)))
def test_rated_answers_have_the_likelihoods_of_lm_eval(loaded: LoadedModel, batch_size: int) -> None:
    actual = wrap_model(loaded, Scoring(batch_size=batch_size)).loglikelihood(rated())
    expected = reference(loaded).loglikelihood(rated())
    assert [row[1] for row in actual] == [row[1] for row in expected]
    assert [row[0] for row in actual] == pytest.approx([row[0] for row in expected], rel=1e-5)


@pytest.mark.story
def test_generated_answers_are_those_of_lm_eval_up_to_the_budget(loaded: LoadedModel) -> None:
    expected = reference(loaded).generate_until(written(12))
    for batch_size in (1, 5):
        lm = wrap_model(loaded, Scoring(batch_size=batch_size))
        actual = lm.generate_until(written(12))
        # lm-eval adds the length of the prompt to the budget.
        for answer, longer in zip(actual, expected, strict=True):
            assert longer.startswith(answer)
            assert answer == longer or len(answer) in (11, 12)  # BART's last token is an end token


def test_the_prompt_does_not_use_up_the_budget_of_an_answer(loaded: LoadedModel) -> None:
    lm = wrap_model(loaded, Scoring(batch_size=4, max_length=20))
    lm.generate_until(written(30, ["a" * 60], until=[]))
    assert [(end.reason, end.tokens) for end in lm.answer_ends] == [("length", 30)]


@pytest.mark.story
def test_an_answer_ends_where_the_decoder_has_no_more_positions(bart: Path) -> None:
    with load_model(model_in(bart), dtype="auto", device="cpu") as loaded_model:
        positions = loaded_model.network.config.max_position_embeddings
        lm = wrap_model(loaded_model, Scoring(batch_size=1))
        lm.generate_until(written(positions + 5, ["a"], until=[]))
        assert [(end.reason, end.tokens) for end in lm.answer_ends] == [("context", positions - 1)]
        with pytest.raises(InvalidInput, match="an answer choice"):
            lm.loglikelihood([Instance("loglikelihood", {}, ("a", "b" * (positions + 1)), 0)])


def test_a_limit_on_prompt_and_answer_together_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(InvalidInput, match="max_gen_toks"):
        wrap_model(loaded, Scoring()).generate_until(written(5, max_length=20))


def letters_task(directory: Path, kind: str) -> EvalTask:
    """Write and pin a task of ``COUNT`` documents, whose answers are generated or chosen."""
    rows = [
        {"word": word, "right": at % 2, "choices": ["AB", "CD"], "answer": (word[:3].upper(), "no")[at % 3 == 2]}
        for at, word in enumerate(prompts(30))
    ]
    chosen = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "right"}
    generated = {"output_type": "generate_until", "doc_to_target": "{{answer}}"}
    generated |= {"generation_kwargs": {"until": ["x"], "max_gen_toks": 6}, "metric_list": [mean_of("exact_match")]}
    config = chosen if kind == "chosen" else generated
    return pin(write_task(directory, kind, rows, doc_to_text="{{word}}>", **config))


def job(directory: Path, task: EvalTask, journal: Path | None = None, **scoring: Any) -> ScoringJob:
    plain = scoring_job(model_in(directory), task, (0, COUNT), **{"batch_size": 4, **scoring})
    return replace(plain, journal=JournalLocation(journal, "key") if journal else None)


def score(scoring_job: ScoringJob) -> dict[tuple[int, str], Any]:
    return {(row.doc_id, row.metric): row for row in score_documents(scoring_job, quiet)}


@pytest.mark.parametrize(("family", "kind"), sampled_rows(product(FAMILIES, KINDS), [("t5", "generated")]))
def test_a_killed_part_resumes_from_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str, request: pytest.FixtureRequest
) -> None:
    directory, task = request.getfixturevalue(family), letters_task(tmp_path, kind)
    expected = score(job(directory, task))
    with load_model(model_in(directory), dtype="auto", device="cpu") as loaded_model:
        network = type(loaded_model.network)
    name = "forward" if kind == "chosen" else "generate"
    calls, limit, compute = 0, 2, getattr(network, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > limit:
            raise KeyboardInterrupt
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(network, name, counted)
    with pytest.raises(KeyboardInterrupt):
        score(job(directory, task, tmp_path / "journal"))
    calls, limit = 0, 1000
    assert score(job(directory, task, tmp_path / "journal")) == expected
    assert calls == (6 if kind == "chosen" else 3) - 2  # two choices per document, four requests per batch


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_prompt_counts_towards_the_tokens_that_are_cut(tmp_path: Path, t5: Path, kind: str) -> None:
    rows = score(job(t5, letters_task(tmp_path, kind), max_length=10))
    tokens = [len(word) + 2 for word in prompts(30)]  # '>' and an end token
    cuts = {doc_id: row.prompt_cut for (doc_id, _), row in rows.items()}
    assert cuts == {number: max(0, count - 10) for number, count in enumerate(tokens)}


def test_longer_answers_have_the_larger_budget_whatever_the_prompt(tmp_path: Path, bart: Path) -> None:
    first = job(bart, letters_task(tmp_path, "generated"), max_length=10)
    assert {row.budgets for row in score(first).values()} == {(6,)}
    rows = score(replace(first, longer=LongerAnswers({"generated": [0, 1, 2]}, {"generated": 12})))
    assert {(row.ended, row.answer_tokens) for row in rows.values()} == {(("length",), (12,))}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "batch_size"), sampled_rows([("t5", 16), ("bart", 1)], [("t5", 16)], pytest.mark.proof)
)  # padding moves the positions of BART
def test_lm_evals_command_has_the_same_scores(tmp_path: Path, family: str, batch_size: int) -> None:
    tasks = [letters_task(tmp_path, kind) for kind in ("chosen", "generated")]
    directory = write(family, tmp_path / "m")
    tokenizer, network = (kind.from_pretrained(directory) for kind in (tf.AutoTokenizer, tf.AutoModelForSeq2SeqLM))
    inputs = tokenizer([f"{word}>" for word in prompts(30)], return_tensors="pt", padding=True)
    labels = tokenizer([word[:3].upper() for word in prompts(30)], return_tensors="pt", padding=True)["input_ids"]
    mask = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    teach(network, {**mask, "labels": labels.masked_fill(labels == tokenizer.pad_token_id, -100)})
    network.save_pretrained(directory)
    definitions = [task.definition for task in tasks if task.definition]
    out = run_lm_eval(tmp_path / "out", directory, definitions, tmp_path / "scratch", batch_size=batch_size)
    metrics = {"chosen": ("acc", "acc_norm"), "generated": ("exact_match",)}
    for task in tasks:
        (file,) = out.rglob(f"samples_{task.name}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        expected = {(row["doc_id"], f"{name},none"): row[name] for row in samples for name in metrics[task.name]}
        actual = score(job(directory, task))
        assert {key: actual[key].outcome for key in expected} == expected
        assert 0 < sum(expected.values()) < len(expected)  # some answers are right, some wrong
    unload_models()


@pytest.mark.story
@pytest.mark.parametrize(("backend", "is_refused"), [("hf", False), ("vllm", True)])
def test_an_encoder_decoder_is_refused_on_a_backend_that_cannot_run_it(
    tmp_path: Path, backend: str, is_refused: bool
) -> None:
    letters_task(tmp_path, "chosen")
    (tmp_path / "profile.yaml").write_text(
        f"name: m\nrecipe: {{merge_method: linear, models: [{{model: a}}]}}\nevaluate:\n  backend: {backend}\n"
        "  tasks: [{task: chosen.yaml, guarded_by: best parent}]\n"
    )
    demands = kind_demands(load_profile(tmp_path / "profile.yaml"))
    kind = find_kind({"architectures": ["T5ForConditionalGeneration"]}, Companions())
    findings = list(kind_findings(kind, demands))
    assert [finding.remedy for finding in findings] == (["set evaluate.backend: hf"] if is_refused else [])
    assert not list(kind_findings(TEXT_GENERATOR, demands))
