"""Evaluation: right scores document by document, each trap of lm-eval closed, nothing said and nothing left behind."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect import flow
from pydantic import ValidationError
from tiny_models import CPU, Prefix, make_model, words, write_choices, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from merge_core.errors import InvalidInput
from merge_core.hashing import HashMemo
from tasks import outcomes
from tasks.evaluate import EvaluateSettings, Scores, default_metric, evaluate
from tasks.guards import Guard
from tasks.harness import score
from tasks.loaded import release
from tasks.model import Model
from tasks.outcomes import DocumentOutcome
from tasks.scoring import Scoring
from tasks.task_definition import EvalTask, pin_task
from tasks.watching import Ending, watched_by

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_stays_in_memory() -> Iterator[None]:
    yield
    release()


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_model(tmp_path / "model")


def pin(path: Path) -> EvalTask:
    return pin_task(path.name, path.parent, HashMemo(path.parent / "hashes.db"))


@pytest.fixture
def task(tmp_path: Path) -> EvalTask:
    return pin(write_choices(tmp_path / "tasks"))


def measure(out: Path, model: Model, task: EvalTask, **scoring: object) -> tuple[Scores, tuple[DocumentOutcome, ...]]:
    out.mkdir(exist_ok=True)
    value = evaluate.work(out, model, task, Scoring.model_validate(scoring), CPU)
    return value, outcomes.read(out / outcomes.FILE)


def documents_of(task: EvalTask) -> list[dict[str, Any]]:
    assert task.definition is not None
    lines = (task.definition.parent / "data" / f"{task.name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def reference_choices(model: Model, document: dict[str, Any], bos: int | None) -> list[float]:
    """Log-likelihood of each choice after the word, by plain transformers; log-softmax in float64."""
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


@pytest.mark.parametrize("prefix", ["bos added by the tokenizer", "eos only"])
def test_every_document_is_scored_as_plain_transformers_do(tmp_path: Path, task: EvalTask, prefix: Prefix) -> None:
    model = make_model(tmp_path / "m", prefix=prefix)
    value, found = measure(tmp_path / "out", model, task)
    wanted = []
    for document in documents_of(task):
        logliks = reference_choices(model, document, 1 if prefix == "bos added by the tokenizer" else None)
        wanted.append(float(max(range(2), key=logliks.__getitem__) == document["right"]))
    assert 0.2 < sum(wanted) / len(wanted) < 0.8  # neither all right nor all wrong: this can fail
    assert [o.outcome for o in found] == wanted
    (total,) = value.tasks
    assert (total.task, total.metric, total.n) == ("letters", "acc,none", 40)
    assert total.score == pytest.approx(sum(wanted) / 40)
    p = total.score
    assert total.stderr == pytest.approx(math.sqrt(p * (1 - p) / 39))


def test_a_bf16_model_is_scored_in_float32_with_one_begin_of_text(
    tmp_path: Path, task: EvalTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    said: list[tuple[float, bool]] = []
    original = HFLM.loglikelihood

    def listen(self: HFLM, *args: Any, **kwargs: Any) -> Any:
        said.extend(original(self, *args, **kwargs))
        return said

    monkeypatch.setattr(HFLM, "loglikelihood", listen)
    model = make_model(tmp_path / "m", dtype=torch.bfloat16)
    measure(tmp_path / "out", model, task, batch_size=1, documents=6)
    by_id = documents_of(task)
    chosen = [by_id[o.doc_id] for o in outcomes.read(tmp_path / "out" / outcomes.FILE)]
    wanted = [loglik for document in chosen for loglik in reference_choices(model, document, 1)]
    assert [loglik for loglik, _ in said] == pytest.approx(wanted, abs=1e-4)  # bf16 steps here are 0.01 and more


def test_a_sample_is_fixed_scattered_and_contained_in_a_larger_one(
    tmp_path: Path, model: Model, task: EvalTask
) -> None:
    _, every = measure(tmp_path / "all", model, task)
    samples = {}
    for n in (5, 15):
        _, samples[n] = measure(tmp_path / f"{n}", model, task, documents=n)
    again = measure(tmp_path / "again", model, task, documents=5)[1]
    other = measure(tmp_path / "other", model, task, documents=5, seed=1)[1]
    assert [len(sample) for sample in samples.values()] == [5, 15]
    assert set(samples[5]) < set(samples[15]) < set(every)  # ids, hashes and scores are those of the full run
    assert again == samples[5]
    assert {o.doc_id for o in other} != {o.doc_id for o in samples[5]}
    assert {o.doc_id for o in samples[5]} != set(range(5))


def test_a_sample_larger_than_the_task_is_the_task(tmp_path: Path, model: Model, task: EvalTask) -> None:
    assert measure(tmp_path / "out", model, task, documents=10_000)[0].tasks[0].n == 40


def test_changed_data_are_seen_even_under_an_old_time_stamp(tmp_path: Path, model: Model) -> None:
    path = write_choices(tmp_path / "tasks")
    data = tmp_path / "tasks" / "data" / "letters.jsonl"
    before = measure(tmp_path / "before", model, pin(path))[1]
    stamp = data.stat()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    write_jsonl(data, ({**row, "right": 1 - row["right"]} for row in rows))
    os.utime(data, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert data.stat().st_size == stamp.st_size
    task = pin_task(path.name, path.parent, HashMemo(tmp_path / "fresh.db"))
    after = measure(tmp_path / "after", model, task)[1]
    assert [1 - o.outcome for o in after] == [o.outcome for o in before]


def test_data_that_change_after_they_were_pinned_are_noticed(tmp_path: Path, model: Model, task: EvalTask) -> None:
    (tmp_path / "tasks" / "data" / "letters.jsonl").write_text('{"word": "a", "right": 0, "choices": ["a", "b"]}\n')
    with pytest.raises(InvalidInput, match="changed while the run was going on"):
        measure(tmp_path / "out", model, task)


def test_it_works_offline_says_nothing_and_leaves_nothing_behind(tmp_path: Path, model: Model, task: EvalTask) -> None:
    """In a process of its own, without the switches of the test suite, outside any repository."""
    script = f"""
import socket, sys
def deny(*args, **kwargs):
    print("asked for", args[0]); raise OSError("no network")
socket.getaddrinfo = deny
sys.path.insert(0, {str(PROJECT)!r})
from pathlib import Path
from tasks.evaluate import *
from tasks.model import Model
from tasks.runtime import Runtime
evaluate.work(Path({str(tmp_path)!r}), Model.model_validate_json({model.model_dump_json()!r}),
    EvalTask.model_validate_json({task.model_dump_json()!r}), Scoring(), Runtime(device="cpu", libraries={{}}))
"""
    home = tmp_path / "home"
    home.mkdir()
    switches = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_UPDATE_DOWNLOAD_COUNTS", "HF_HOME", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    environment |= {"HOME": str(home), "PREFECT_HOME": str(tmp_path / "prefect"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=home, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert outcomes.read(tmp_path / outcomes.FILE)
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_progress_is_told_up_to_the_last_request(model: Model, task: EvalTask) -> None:
    told: list[tuple[int, int]] = []
    score(model, task, Scoring(batch_size=8), "cpu", lambda done, total: told.append((done, total)))
    assert told[-1] == (80, 80)  # two choices a document
    assert told == sorted(told)


def test_few_shot_examples_change_the_prompts_and_their_hashes(tmp_path: Path, model: Model) -> None:
    task = pin(write_choices(tmp_path / "tasks", extra="fewshot_split: test\n"))
    plain, shot = (measure(tmp_path / f"{n}", model, task, num_fewshot=n, documents=5)[1] for n in (0, 2))
    assert [o.doc_hash for o in plain] == [o.doc_hash for o in shot]
    assert not {o.prompt_hash for o in plain} & {o.prompt_hash for o in shot}
    with pytest.raises(InvalidInput, match="another prompt on each side"):
        outcomes.pair(plain, shot, "acc,none", "letters")


def test_few_shot_examples_are_drawn_alike_for_every_model_and_follow_the_seed(tmp_path: Path, model: Model) -> None:
    task = pin(write_choices(tmp_path / "tasks", extra="fewshot_split: test\n"))
    merge = make_model(tmp_path / "merge", seed=1)
    runs = [(model, 0), (merge, 0), (merge, 1)]
    prompts = [
        [o.prompt_hash for o in measure(tmp_path / f"{i}", who, task, num_fewshot=2, seed=seed)[1]]
        for i, (who, seed) in enumerate(runs)
    ]
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_perplexity_task_is_refused_with_the_place_for_it(tmp_path: Path, model: Model) -> None:
    write_jsonl(tmp_path / "t.jsonl", ({"text": word} for word in words(5)))
    (tmp_path / "t.yaml").write_text(
        "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: t.jsonl}}\ntest_split: test\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n"
    )
    with pytest.raises(InvalidInput, match="under 'perplexity:'"):
        measure(tmp_path / "out", model, pin(tmp_path / "t.yaml"))


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
        measure(tmp_path / "out", model, pin(tmp_path / "tasks" / "t.yaml"))
    assert "t.yaml" in caught.value.where


def test_a_chat_template_that_there_is_not_is_refused(tmp_path: Path, model: Model, task: EvalTask) -> None:
    with pytest.raises(InvalidInput, match="a tokenizer without one"):
        measure(tmp_path / "out", model, task, chat_template=True)


class Endings:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Ending]] = []

    def started(self, stage: str, subject: str) -> None: ...
    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None: ...
    def ended(self, stage: str, subject: str, ending: Ending, seconds: float, summary: str) -> None:
        self.seen.append((subject, ending))


@pytest.mark.usefixtures("prefect_api", "home")
def test_each_model_and_task_is_evaluated_once_whatever_is_added_or_renamed(
    tmp_path: Path, model: Model, task: EvalTask
) -> None:
    second = pin(write_choices(tmp_path / "tasks", n=10, name="more"))
    renamed = model.model_copy(update={"name": "same by another name"})

    def endings(*calls: Callable[[], object]) -> list[Ending]:
        watcher = Endings()

        @flow
        def run() -> None:
            for call in calls:
                call()

        with watched_by(watcher):
            run()
        return [ending for _, ending in watcher.seen]

    scoring = Scoring()
    assert endings(lambda: evaluate(model, task, scoring, CPU)) == ["made"]
    assert endings(
        lambda: evaluate(model, task, scoring, CPU),
        lambda: evaluate(model, second, scoring, CPU),
        lambda: evaluate(renamed, task, scoring, CPU),
        lambda: evaluate(model, task, Scoring(batch_size=4), CPU),
        lambda: evaluate(model, task, scoring, CPU.model_copy(update={"libraries": {"torch": "9"}})),
    ) == ["cached", "made", "cached", "made", "made"]


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
    assert type(settings.scoring) is Scoring  # a threshold must not be in the key of an evaluation
    assert (settings.rule.confidence, settings.rule.on_inconclusive) == (0.9, "block")
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
def test_settings_that_cannot_mean_anything_are_refused(wrong: dict[str, object]) -> None:
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
