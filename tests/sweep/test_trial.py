"""Test a trial: it gives the same numbers as the stages in less time, independent of earlier trials."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from samples import sampled
from trial_settings import DEMO, PLAIN, StopsAt, demo, setting_of, stage_scores, ties, written_merge

from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import ChangedInput, InvalidInput
from mergegate.merge_core.files import HashMemo, JournalLocation
from mergegate.tasks.models.checkpoints import Model, load_model, pin_checkpoints, resolve_parents, unload_models
from mergegate.tasks.models.checkpoints.model_process import _Answers
from mergegate.tasks.quality.evaluation import DocumentSplits, Scoring, tokenize_task
from mergegate.tasks.quality.evaluation.backends.hf import wrap_model
from mergegate.tasks.quality.perplexity.measurement import WindowSettings, measure
from mergegate.tasks.quality.perplexity.text import read_texts
from mergegate.tasks.sweep import trial
from mergegate.tasks.sweep.objective import TEXT, MetricKey
from mergegate.tasks.sweep.study import TrialRequest, TrialScores
from mergegate.tasks.sweep.trial import TrialSet, TrialSetting, score_trial

EVERY = tuple(MetricKey(task, "log_likelihood") for task in PLAIN)


@pytest.fixture(autouse=True)
def ask_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score trials in this process instead of the model process. Requests and answers are still pickled."""

    def ask(function: Callable[..., Any], arguments: tuple[object, ...], **_: object) -> Any:
        answer = function(*pickle.loads(pickle.dumps(arguments)), lambda done, total: None)
        return _Answers(io.BytesIO(pickle.dumps(answer))).load()

    monkeypatch.setattr(trial, "call_model_process", ask)


@pytest.fixture(scope="module", autouse=True)
def empty_memory() -> Iterator[None]:
    yield
    trial._workspace = None
    unload_models()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo(tmp_path_factory.mktemp("demo"), 16)


@pytest.fixture(scope="module")
def setting(work: Path) -> TrialSetting:
    return setting_of(work, EVERY)


def same(one: TrialScores, other: TrialScores) -> bool:
    """Return whether two results have bit-identical scores."""
    return one.table.keys() == other.table.keys() and all(
        np.array_equal(numbers, other.table[key]) for key, numbers in one.table.items()
    )


def network_now() -> Any:
    return trial._workspace.network


# Scores


@pytest.mark.story
def test_log_likelihoods_equal_those_of_lm_eval(work: Path, tmp_path: Path) -> None:
    metric_keys = [MetricKey(task, "log_likelihood") for task in ("reverse", "choices", "few_shot", "written")]
    metric_keys += [MetricKey("choices", "probability"), MetricKey("reverse", "probability")]
    setting = setting_of(work, metric_keys, scoring=Scoring(dtype="float32", batch_size=5))
    table = score_trial(setting, TrialRequest(ties())).table
    model = written_merge(setting, ties(), tmp_path / "out")
    with load_model(model, dtype="float32", device="cpu") as loaded:
        lm = wrap_model(loaded, setting.scoring)
        for task in setting.sets["search"].tasks:
            found, probability = table[MetricKey(task.name, "log_likelihood")], MetricKey(task.name, "probability")
            for position, document in enumerate(tokenize_task(task, setting.scoring, loaded).documents):
                requests = [(("", ""), list(pair.context), list(pair.continuation)) for pair in document.pairs]
                likelihoods = [likelihood for likelihood, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]
                lengths = [len(pair.continuation) for pair in document.pairs]
                best = max(likelihoods[right] / lengths[right] for right in document.right)
                assert found[position] == pytest.approx(best, abs=1e-5)
                if task.name in ("choices", "reverse"):
                    (right,) = document.right
                    every = sum(map(math.exp, likelihoods)) if task.name == "choices" else 1
                    assert table[probability][position] == pytest.approx(math.exp(likelihoods[right]) / every, abs=1e-5)


@pytest.mark.story
def test_entropies_equal_a_direct_computation(work: Path, tmp_path: Path) -> None:
    """They match a reference that reads each answer alone, with all probabilities in float64.

    The entropy of a multiple-choice document is that of the softmax over its choices.
    """
    metric_keys = [MetricKey(task, "entropy") for task in ("reverse", "choices", "few_shot", "written")]
    setting = setting_of(work, metric_keys, scoring=Scoring(dtype="float32"))
    table = score_trial(setting, TrialRequest(ties())).table
    model = written_merge(setting, ties(), tmp_path / "out")
    with load_model(model, dtype="float32", device="cpu") as loaded, torch.inference_mode():
        for task in setting.sets["search"].tasks:
            for position, document in enumerate(tokenize_task(task, setting.scoring, loaded).documents):
                entropies, likely = [], []
                for context, continuation in document.pairs:
                    read = torch.tensor([[*context, *continuation]])
                    every = loaded.network(read).logits[0, len(context) - 1 : -1].double().log_softmax(-1)
                    entropies += (-(every.exp() * every).sum(-1)).tolist()
                    likely.append(float(every.gather(1, read[0, len(context) :, None]).sum()))
                shares = torch.tensor(likely, dtype=torch.float64).softmax(0)
                of_choice = float(torch.special.entr(shares).sum())
                expected = of_choice if task.name == "choices" else float(np.mean(entropies))
                assert table[MetricKey(task.name, "entropy")][position] == pytest.approx(-expected, abs=1e-5)


@pytest.mark.story
def test_prompts_and_answers_equal_those_of_lm_eval(work: Path, setting: TrialSetting) -> None:
    """The decoded tokens of a document are the text in lm-eval's sample log, including few-shot examples."""
    own = setting_of(work, [MetricKey("few_shot", "exact")])
    score_trial(own, TrialRequest(ties()))
    loaded = network_now().loaded
    posed = tokenize_task(own.sets["search"].tasks[0], own.scoring, loaded)
    texts = {row["prompt"]: row["answer"] for row in map(eval, (work / "data/reverse.jsonl").read_text().splitlines())}
    for document in posed.documents:
        (pair,) = document.pairs
        shown = loaded.tokenizer.decode(pair.context).replace(" ", "")
        question = "rev:" + shown.split("rev:")[-1]
        assert shown.count("rev:") == 3
        assert loaded.tokenizer.decode(pair.continuation).replace(" ", "") == texts[question.replace("rev:", "rev: ")]


METRICS = {MetricKey(task, "exact"): "acc,none" for task in ("copy", "reverse", "shift", "choices")}
METRICS[MetricKey("choices", "probability")] = "prob,none"
METRICS[MetricKey("written", "metric", "exact_match,none")] = "exact_match,none"


@pytest.fixture(scope="module")
def many(work: Path) -> TrialSetting:
    """Return a study that evaluates all metrics."""
    return setting_of(work, list(METRICS))


@pytest.fixture(scope="module")
def merged(many: TrialSetting, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return written_merge(many, ties(0.6, 0.4), tmp_path_factory.mktemp("merged") / "out")


@pytest.mark.parametrize("key", sampled(METRICS, list(METRICS)[1:2]), ids=lambda key: f"{key.task}-{key.measure}")
def test_scores_equal_those_of_the_evaluation_stage(many: TrialSetting, merged: Model, key: MetricKey) -> None:
    scores = score_trial(many, TrialRequest(ties(0.6, 0.4)))
    task = next(one for one in many.sets["search"].tasks if one.name == key.task)
    expected = stage_scores(merged, task, many.scoring, METRICS[key])
    assert scores.table[key].tolist() == pytest.approx(expected, abs=2e-2 if key.measure == "probability" else 0)
    assert 0 < np.mean(expected) <= 1


@pytest.mark.story
def test_held_out_text_is_read_like_in_the_perplexity_stage(work: Path, tmp_path: Path) -> None:
    windows = WindowSettings(max_length=24, batch_size=4)
    setting = setting_of(work, [MetricKey(TEXT, "log_likelihood")], windows=windows)
    scores = score_trial(setting, TrialRequest(ties())).table[MetricKey(TEXT, "log_likelihood")]
    model = written_merge(setting, ties(), tmp_path / "out")
    text = setting.sets["search"].text
    rows = measure(
        model, text, windows, "cpu", JournalLocation(tmp_path / "journal", "key"), lambda done, total: None
    ).rows
    assert scores.tolist() == pytest.approx([row.loglik / row.tokens for row in rows], rel=1e-6)
    only = text.model_copy(update={"only": DocumentSplits(search=3, confirmation=2).of("search")})
    some = replace(setting, sets={"search": TrialSet(text=only)})
    of_some = score_trial(some, TrialRequest(ties())).table[MetricKey(TEXT, "log_likelihood")]
    those = [at for at, _ in read_texts(only, None)]
    assert len(those) == 3
    assert of_some.tolist() == pytest.approx([rows[at].loglik / rows[at].tokens for at in those], rel=1e-2)


@pytest.mark.story
def test_an_unmerged_parent_scores_like_in_the_evaluation_stage(work: Path) -> None:
    setting = setting_of(work, [MetricKey("reverse", "exact"), MetricKey("shift", "exact")])
    scores = score_trial(setting, setting.parent_request("reverser")).table
    parent = next(one for one in setting.parents if one.name == "reverser")
    for task in setting.sets["search"].tasks:
        expected = stage_scores(parent, task, setting.scoring, "acc,none")
        assert scores[MetricKey(task.name, "exact")].tolist() == expected
    with pytest.raises(InvalidInput, match="'revesrer', which is not the name of a parent"):
        setting.parent_request("revesrer")


@pytest.mark.story
def test_the_change_is_measured_from_the_base(setting: TrialSetting, tmp_path: Path) -> None:
    for number in range(2):  # the first merge is loaded from files, the second is copied in
        change = score_trial(replace(setting, base="base"), TrialRequest(ties())).change
        written_merge(setting, ties(), tmp_path / f"out{number}")
        merge, base = (
            {name: tensor.double() for name, tensor in load_file(where / "model.safetensors").items()}
            for where in (tmp_path / f"out{number}", DEMO / "models/base")
        )
        moved = math.sqrt(sum(float((merge[name] - base[name]).square().sum()) for name in base))
        assert change == pytest.approx(moved / math.sqrt(sum(float(one.square().sum()) for one in base.values())))
    assert math.isnan(score_trial(setting, TrialRequest(ties())).change)


# Independence of earlier trials and settings


@pytest.mark.story
def test_earlier_trials_do_not_change_a_score(setting: TrialSetting) -> None:
    trial._workspace = None
    first = score_trial(setting, TrialRequest(ties(0.8)))  # loaded from files
    score_trial(setting, TrialRequest(ties(0.3, 0.2, "dare_ties")))
    again = score_trial(setting, TrialRequest(ties(0.8)))  # copied in
    score_trial(setting, TrialRequest(ties(), document_set="confirmation"))
    third = score_trial(setting, TrialRequest(ties(0.8)))
    assert same(first, again)
    assert same(first, third)


@pytest.mark.story
def test_the_seed_of_random_masks_changes_the_score(setting: TrialSetting) -> None:
    request = TrialRequest(ties(1.0, 0.3, "dare_ties"))
    assert not same(score_trial(setting, request), score_trial(replace(setting, seed=1), request))


@pytest.mark.story
def test_a_dropped_candidate_has_the_same_scores_on_the_first_documents(setting: TrialSetting) -> None:
    looks = (0.2, 0.5, 1.0)
    own = replace(setting, looks=looks)
    whole = score_trial(own, TrialRequest(ties()))
    for look, documents in enumerate((4, 8, 16)):
        stopped = score_trial(own, TrialRequest(ties(), race=StopsAt(looks, look)))
        assert stopped.dropped == (look < 2)
        for key, numbers in stopped.table.items():
            assert numbers.tolist() == whole.table[key][:documents].tolist()
    in_one = score_trial(setting, TrialRequest(ties())).table
    assert all(np.allclose(whole.table[key], numbers, atol=2e-2) for key, numbers in in_one.items())


@pytest.mark.story
def test_the_number_of_torch_threads_is_restored(setting: TrialSetting) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        score_trial(setting, TrialRequest(ties()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# Candidates that cannot be scored


@pytest.mark.story
def test_a_refused_merge_is_a_problem_of_its_candidate_only(setting: TrialSetting) -> None:
    good = score_trial(setting, TrialRequest(ties()))
    for recipe, message in (
        ({**ties(), "parameters": {"lambda": 1e39}}, "NaN or infinite"),
        (ties(density=7.0), "density"),
        ({**ties(), "base_model": "elsewhere"}, "not among the parents"),
    ):
        refused = score_trial(setting, TrialRequest(recipe))
        assert message in refused.problem
        assert refused.table == {}
    assert same(good, score_trial(setting, TrialRequest(ties())))


@pytest.mark.story
def test_a_network_that_computes_nan_is_a_problem(setting: TrialSetting) -> None:
    huge = {**ties(), "parameters": {"lambda": 1e8}}  # finite in bfloat16
    half = replace(setting, scoring=Scoring(dtype="float16"))
    assert "is not a finite number" in score_trial(half, TrialRequest(huge)).problem
    assert not score_trial(setting, TrialRequest(huge)).problem


@pytest.mark.story
def test_a_changed_parent_ends_the_study(work: Path, tmp_path: Path) -> None:
    shutil.copytree(DEMO / "models", tmp_path / "models")
    recipe = json.loads(json.dumps(ties()).replace(str(DEMO), str(tmp_path)))
    parents = pin_checkpoints(resolve_parents(load_recipe(recipe)), HashMemo(tmp_path / "h.db"))
    setting = setting_of(work, EVERY, parents=parents)
    assert not score_trial(setting, TrialRequest(recipe)).problem
    os.utime(tmp_path / "models/shifter/model.safetensors")
    with pytest.raises(ChangedInput, match="changed while trials"):
        score_trial(setting, TrialRequest(recipe))


def test_another_backend_is_rejected(work: Path) -> None:
    setting = setting_of(work, EVERY, scoring=Scoring(backend="vllm"))
    with pytest.raises(InvalidInput, match="hf"):
        score_trial(setting, TrialRequest(ties()))


def test_a_right_answer_that_is_not_a_choice_has_no_likelihood(work: Path, tmp_path: Path) -> None:
    own = demo(tmp_path / "demo", 4)
    path = own / "data/choices.jsonl"
    path.write_text(path.read_text().replace('"right": 0', '"right": 9'))
    with pytest.raises(InvalidInput, match="not among the choices"):
        score_trial(setting_of(own, [MetricKey("choices", "log_likelihood")]), TrialRequest(ties()))
    exact = score_trial(setting_of(own, [MetricKey("choices", "exact")]), TrialRequest(ties())).table
    assert exact[MetricKey("choices", "exact")].min() == 0
