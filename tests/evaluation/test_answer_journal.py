"""A part that was killed after any batch resumes with the batches and numbers of an uninterrupted run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sampled
from scoring_runs import pin, scoring_job
from tiny_models import make_model, words, write_choices
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergegate.merge_core.files.records import JournalLocation, open_journal
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.backends import find_backend
from mergegate.tasks.quality.evaluation.backends.hf_models import SharedPrefixLM
from mergegate.tasks.quality.evaluation.backends.shared_prefix import SharedRow
from mergegate.tasks.quality.evaluation.scoring import harness
from mergegate.tasks.quality.evaluation.scoring.answer_journal import attach_journal
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore

HF = find_backend("hf").computes_in


class Killed(BaseException):
    """Simulated SIGKILL: no handler catches it, and only the journal survives."""


class Requested:
    """The attributes of lm-eval's ``Instance`` that a model reads."""

    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load a model in bfloat16, where a different batch yields different numbers."""
    model = make_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)
    network = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    how = {"backend": "causal", "batch_size": 1, "max_length": 48}
    return SharedPrefixLM(pretrained=network, tokenizer=tokenizer, **how)


@pytest.fixture
def batches(lm: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the token ids of every batch, and kill the model in the batch after the first ``limit``."""
    seen: list[Any] = Watched()

    def watch(name: str) -> Any:
        compute = getattr(lm, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs["context"] if "context" in kwargs else getattr(args[0], "tokens", args[0])
            if len(seen) == seen.limit:  # type: ignore[attr-defined]
                raise Killed
            seen.append(ids.tolist())
            return compute(*args, **kwargs)

        return watched

    for name in HF:
        monkeypatch.setattr(lm, name, watch(name), raising=True)
    return seen


class Watched(list[Any]):
    limit = -1


def ask(lm: Any, name: str, place: JournalLocation | None, seed: int = 7) -> list[Any]:
    """Return the answers to one of the ``REQUESTS``."""
    kind, requests = REQUESTS[name]
    torch.manual_seed(seed)
    watched = {name: vars(lm)[name] for name in HF if name in vars(lm)}
    try:
        with open_journal(place) as journal, attach_journal(lm, journal, HF) as model:
            return list(getattr(model, kind)(requests))
    finally:
        vars(lm).update(watched)  # the patched method from ``batches`` is an instance attribute, too


def choices() -> list[Requested]:
    """Return prompts with choices of one letter, which share a forward pass, and of several letters, with repeats."""
    prompts = [*words(10, 3), *words(4, 3)]
    found = [Requested(prompt, letter) for prompt in prompts for letter in ("a", "b", "cde")]
    random.Random(1).shuffle(found)
    return found


def generations(**how: Any) -> list[Requested]:
    """Return prompts that alternate between two settings; some prompts repeat."""
    settings = [{"until": ["."], "max_gen_toks": most, **how} for most in (6, 9)]
    prompts = [*words(9, 2), *["abc"] * 5]
    return [Requested(prompt, settings[at % 3 == 1]) for at, prompt in enumerate(prompts)]


REQUESTS = {
    "choices": ("loglikelihood", choices()),
    "greedy": ("generate_until", generations(do_sample=False)),
    "sampled": ("generate_until", generations(do_sample=True, temperature=1.5)),
}


@pytest.mark.parametrize("name", sampled(REQUESTS, ["choices"]))
def test_a_killed_batch_is_repeated_and_the_result_is_identical(
    tmp_path: Path, lm: Any, batches: Watched, name: str
) -> None:
    wanted = ask(lm, name, None)
    undisturbed = list(batches)
    assert len(undisturbed) >= 4
    for killed in range(0, len(undisturbed), 2):
        place = JournalLocation(tmp_path / f"{killed}.journal", "key")
        del batches[:]
        batches.limit = killed
        with pytest.raises(Killed):
            ask(lm, name, place)
        assert batches == undisturbed[:killed]
        batches.limit = -1
        assert ask(lm, name, place) == wanted
        assert batches == undisturbed  # no batch runs twice or is split differently


def test_sampled_answers_to_one_question_stay_different_answers(tmp_path: Path, lm: Any) -> None:
    place = JournalLocation(tmp_path / "journal", "key")
    answers = ask(lm, "sampled", place)
    assert len(set(answers[-5:])) > 1
    assert ask(lm, "sampled", place, seed=8) == answers


def test_recorded_answers_are_not_requested_again(tmp_path: Path, lm: Any, batches: Watched) -> None:
    place = JournalLocation(tmp_path / "journal", "key")
    counts = []
    for _ in range(2):
        for name in ("choices", "greedy"):  # both kinds in one part, in sequence
            ask(lm, name, place)
        counts.append(len(batches))
    assert counts[0] == counts[1] > 0


@pytest.mark.story
def test_a_killed_part_resumes_from_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the harness, outcomes are equal, no batch runs twice, and progress includes the recorded answers."""
    model = make_model(tmp_path / "model", dtype=torch.bfloat16)
    job = scoring_job(model, pin(write_choices(tmp_path / "tasks")), batch_size=2)
    kind, seen, limit = SharedPrefixLM, list[Any](), -1
    compute = kind.answer_row

    def watched(self: Any, row: SharedRow, requests: Any) -> Any:
        if len(seen) == limit:
            raise Killed
        seen.append(row.tokens.tolist())
        return compute(self, row, requests)

    monkeypatch.setattr(kind, "answer_row", watched)
    told: list[tuple[int, int]] = []

    def score(place: JournalLocation | None) -> tuple[DocumentScore, ...]:
        return harness.score_documents(replace(job, journal=place), lambda *far: told.append(far))

    try:
        wanted = score(None)
        undisturbed = list(seen)
        del seen[:]
        place, limit = JournalLocation(tmp_path / "journal", "key"), 3
        with pytest.raises(Killed):
            score(place)
        del told[:]
        limit = -1
        assert score(place) == wanted
    finally:
        unload_models()
    assert seen == undisturbed
    assert told[0][0] > 18
    assert told[-1] == (80, 80)  # two choices per document


class Named:
    """An LM that, like the vLLM backend, reports the generation settings that it derived from the request."""

    def set_cache_hook(self, hook: Any) -> None:
        self.cache_hook = hook

    def generate_until(self, requests: list[Requested]) -> list[str]:
        self.asked = [request.args[0] for request in requests]
        for prompt in self.asked:
            self.compute(prompt)
            self.cache_hook.add_partial("generate_until", (prompt, {"until": ["."], "max_gen_toks": 5}), prompt.upper())
        return [prompt.upper() for prompt in self.asked]

    def compute(self, prompt: str) -> None:
        if prompt == "c":
            raise Killed


@pytest.mark.parametrize("computes_in", [("compute",), ()], ids=["batch by batch", "answer by answer"])
def test_an_answer_with_derived_settings_is_recorded(tmp_path: Path, computes_in: tuple[str, ...]) -> None:
    requests = [Requested(prompt, {"until": ["."]}) for prompt in "abcd"]
    place = JournalLocation(tmp_path / "journal", "key")
    lm = Named()
    with pytest.raises(Killed), open_journal(place) as journal, attach_journal(lm, journal, computes_in) as model:
        model.generate_until(requests)
    lm.compute = lambda prompt: None  # type: ignore[method-assign]
    with open_journal(place) as journal, attach_journal(lm, journal, ()) as model:
        assert model.generate_until(requests) == ["A", "B", "C", "D"]
        assert model.restored == 2
    assert lm.asked == ["c", "d"]
