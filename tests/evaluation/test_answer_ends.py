"""Every generated answer records how it ended, and a run warns about truncated answers."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled_rows
from scoring_runs import mean_of, model_in, pin, quiet, score, scoring_job, write_task
from tiny_models import CPU, LETTERS, make_model, write_choices
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergegate.merge_core.files.records import JournalLocation, open_journal
from mergegate.tasks.base.stage.stages import separate_store
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.backends import AnswerEnd, find_backend, hf_models, vllm
from mergegate.tasks.quality.evaluation.backends.answer_ends import answer_end
from mergegate.tasks.quality.evaluation.backends.server import _ends_in
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.scoring.answer_journal import attach_journal
from mergegate.tasks.quality.evaluation.scoring.document_scores import (
    SCORES_FILE,
    DocumentScore,
    read_document_scores,
    write_document_scores,
)
from mergegate.tasks.quality.evaluation.scoring.harness import LongerAnswers, score_documents
from mergegate.tasks.quality.evaluation.scoring.scores import AnswerEnds, Scores, answer_ends
from mergegate.tasks.quality.evaluation.settings import Scoring
from mergegate.tasks.quality.evaluation.stage import evaluate_documents, lengthen_answers, pin_data

EOS = 2
A, B, C, DOT = (3 + LETTERS.index(letter) for letter in ">: .")  # no prompt contains them


@pytest.fixture(autouse=True)
def nothing_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(vllm, "_engine", None)
    yield
    unload_models()


def generation_task(directory: Path, until: Sequence[str] = (".",), n: int = 40, **settings: Any) -> EvalTask:
    write_choices(directory, n)
    config: dict[str, Any] = {"include": "letters.yaml", "output_type": "generate_until", "doc_to_choice": None}
    config |= {"doc_to_target": "{{choices[right]}}", "metric_list": [mean_of("exact_match")]}
    return pin(write_task(directory, "free", **config, generation_kwargs={"until": list(until), **settings}))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Return a function that saves a model that repeats token ids in answer to every prompt."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def model_that_writes(*ids: int) -> Model:
        model = make_model(root / "-".join(map(str, ids)))
        network = AutoModelForCausalLM.from_pretrained(model.directory)
        size = network.config.vocab_size
        with torch.no_grad():
            for layer in network.model.layers:  # only the current token determines the next one
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            embeddings = torch.nn.functional.pad(torch.eye(size), (0, network.config.hidden_size - size))
            network.model.embed_tokens.weight.copy_(embeddings)
            head = torch.zeros_like(network.lm_head.weight)
            following = dict.fromkeys(range(size), ids[0]) | dict(zip(ids, (*ids[1:], ids[0]), strict=True))
            for token, after in following.items():
                head[after, token] = 1.0
            network.lm_head.weight.copy_(head)
        network.save_pretrained(model.directory)
        return model

    return model_that_writes


ENDED = [
    ((A, B, C, EOS), {"max_gen_toks": 4}, ("eos", 4)),  # exactly at the budget
    ((A, B, DOT), {"max_gen_toks": 6}, ("stop", 3)),
    ((A, B, C), {"max_new_tokens": 5}, ("length", 5)),
    ((A, B, C, EOS), {"max_gen_toks": 6}, ("eos", 4)),
    ((A, B, C, EOS), {"max_gen_toks": 3}, ("length", 3)),  # complete, but looks truncated
    ((A, B, DOT), {"max_gen_toks": 3}, ("stop", 3)),
    ((A, B, C), {"until": ["</s>"], "max_gen_toks": 40}, ("length", 40)),  # spans several chunks
    ((A, B, C, EOS), {"until": [], "max_gen_toks": 6, "repetition_penalty": 1.0001}, ("eos", 4)),  # lm-eval's own path
]


@pytest.mark.parametrize(("ids", "settings", "end"), sampled_rows(ENDED, ENDED[:3]))
def test_the_end_of_an_answer_is_recorded(
    tmp_path: Path, writer: Callable[..., Model], ids: Sequence[int], settings: dict[str, Any], end: tuple[str, int]
) -> None:
    rows = score(writer(*ids), generation_task(tmp_path, n=6, **settings))
    assert [(row.ended, row.answer_tokens) for row in rows] == [((end[0],), (end[1],))] * 6


def test_choices_have_no_end(tmp_path: Path) -> None:
    rows = score(make_model(tmp_path / "m"), pin(write_choices(tmp_path, 5)))
    assert {row.ended for row in rows} == {()}
    assert answer_ends("letters", rows) == {}


def test_the_journal_gives_back_how_answers_ended(
    tmp_path: Path, writer: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = scoring_job(writer(A, B, C), generation_task(tmp_path, n=6, max_gen_toks=6))
    job = replace(job, journal=JournalLocation(tmp_path / "journal", "key"))
    first = score_documents(job, quiet)
    monkeypatch.setattr(hf_models, "answer_end", lambda *_: pytest.fail("an answer was generated again"))
    assert score_documents(job, quiet) == first
    assert first[0].ended == ("length",)


@pytest.mark.parametrize(
    ("choices", "usage", "ends"),
    [
        ([{"finish_reason": "stop"}], None, [AnswerEnd("stop")]),
        ([{"finish_reason": "stop", "stop_reason": None}], 4, [AnswerEnd("eos", 4)]),
        ([{"finish_reason": "stop", "stop_reason": 128009}], None, [AnswerEnd("eos")]),
        ([{"finish_reason": "stop", "stop_reason": "\n"}], None, [AnswerEnd("stop")]),
        ([{"finish_reason": "length"}], 24, [AnswerEnd("length", 24)]),
        ([{"finish_reason": "content_filter"}], None, [AnswerEnd()]),
        ([{}], None, [AnswerEnd()]),
        # The usage counts both together.
        (
            [{"index": 1, "finish_reason": "length"}, {"finish_reason": "stop"}],
            30,
            [AnswerEnd("stop"), AnswerEnd("length")],
        ),
    ],
)
def test_finish_reasons_of_servers_are_mapped_in_the_order_of_prompts(
    choices: list[dict[str, Any]], usage: int | None, ends: list[AnswerEnd]
) -> None:
    answer = {
        "choices": [{"index": 0, **choice} for choice in choices],
        "usage": usage and {"completion_tokens": usage},
    }
    assert _ends_in(answer) == ends


def test_vllm_reports_how_answers_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {  # finish_reason, stop_reason, number of tokens, and the end that is reported
        "a": ("stop", None, 3, AnswerEnd("eos", 3)),
        "b": ("stop", ".", 4, AnswerEnd("stop", 4)),
        "c": ("length", None, 8, AnswerEnd("length", 8)),
        "d": ("length", None, 5, AnswerEnd("context", 5)),
        "e": ("stop", 128009, 2, AnswerEnd("eos", 2)),
        "f": ("abort", None, 0, AnswerEnd("", 0)),
    }

    class VLLM:
        def __init__(self, **_: Any) -> None: ...

        def set_cache_hook(self, hook: Any) -> None:
            self.cache_hook = hook

        def _model_generate(self, requests: Any, generate: bool = False, sampling_params: Any = None) -> Any:
            return [
                SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason, stop_reason=by, token_ids=[0] * tokens)])
                for reason, by, tokens, _ in map(replies.__getitem__, requests)
            ]

        def generate_until(self, requests: list[Any]) -> list[str]:
            prompts = [request.args[0] for request in requests][::-1]
            params = [SimpleNamespace(max_tokens=8)] * len(prompts)
            self._model_generate(requests=prompts, generate=True, sampling_params=params)
            for prompt in prompts:
                self.cache_hook.add_partial("generate_until", (prompt, {"until": ["."], "max_gen_toks": 8}), prompt)
            return prompts[::-1]

    module = types.ModuleType("lm_eval.models.vllm_causallms")
    module.VLLM = VLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    requests = [SimpleNamespace(args=(prompt, {"until": ["."]})) for prompt in replies]
    with (
        find_backend("vllm").opened(model_in(tmp_path), Scoring(backend="vllm"), "cpu") as lm,
        open_journal(None) as journal,
        attach_journal(lm, journal, ()) as asked,
    ):
        asked.generate_until(requests)
    assert [end for _, end in asked.ended_answers] == [end for *_, end in replies.values()]


@given(
    answer=st.lists(st.sampled_from("abc."), max_size=12),
    padding=st.integers(0, 4),
    stop=st.lists(st.sampled_from(["", ".", "ab", "ca."]), max_size=3),
    has_eos=st.booleans(),
)
def test_an_end_is_the_first_thing_that_ends_an_answer(
    answer: list[str], padding: int, stop: list[str], has_eos: bool
) -> None:
    """The reference is a search that adds one token at a time."""
    written = [*answer, *(["$"] if has_eos else []), *["$" if has_eos else "a"] * padding]
    budget = len(written)
    expected = AnswerEnd("length", budget)
    for count in range(1, budget + 1):
        if any(one in "".join(written[:count]) for one in stop if one):
            expected = AnswerEnd("stop", count)
            break
        if written[count - 1] == "$":
            expected = AnswerEnd("eos", count)
            break
    ids = [ord(letter) for letter in written]
    assert answer_end(ids, {ord("$")}, stop, lambda ids: ["".join(map(chr, ids))], budget) == expected


def row(doc_id: int, ended: tuple[str, ...], tokens: tuple[int | None, ...], metric: str = "acc,none") -> DocumentScore:
    return DocumentScore("t", metric, doc_id, "d", "p", "t", 1.0, ended=ended, answer_tokens=tokens)


def test_ends_are_stored_with_the_scores_and_older_tables_have_none(tmp_path: Path) -> None:
    rows = (row(0, ("eos", "length"), (3, None)), row(1, (), ()))
    write_document_scores(tmp_path / "new.parquet", rows)
    assert read_document_scores(tmp_path / "new.parquet") == rows
    table = pq.read_table(tmp_path / "new.parquet").drop_columns(["ended", "answer_tokens"])
    pq.write_table(table, tmp_path / "old.parquet")
    assert [row.ended for row in read_document_scores(tmp_path / "old.parquet")] == [(), ()]


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([("length", 24)] * 58 + [("eos", 24)] * 2, "58 of 60 answers reached max_gen_toks (24)"),
        ([("length", 24), ("length", 512), ("stop", 3)], "2 of 3 answers reached max_gen_toks (24 to 512)"),
        ([("length", None), ("", None)], "1 of 1 answers reached max_gen_toks"),
        ([("context", 5), ("eos", 5)], "1 of 2 answers reached the end of the context"),
        ([("eos", 24), ("stop", 3)], ""),
    ],
)
def test_answers_that_were_cut_off_are_counted_once_a_document(ends: list[tuple[str, int | None]], text: str) -> None:
    rows = [
        row(number, (reason,), (tokens,), metric)
        for number, (reason, tokens) in enumerate(ends)
        for metric in ("acc", "other")
    ]
    (found,) = answer_ends("t", rows).values()
    assert found.describe() == text
    summary = Scores(model="m", tasks=(), lm_eval_version="0", ends={"t": found}).summary()
    assert summary == text
    assert AnswerEnds.model_validate_json(found.model_dump_json()) == found


def longer(model: Model, task: EvalTask, doc_ids: Sequence[int], budget: int, **scoring: Any) -> list[DocumentScore]:
    """Return the scores of some documents with a larger token budget."""
    job = scoring_job(model, task, **scoring)
    answers = LongerAnswers({"free": doc_ids}, {"free": budget})
    return list(score_documents(replace(job, longer=answers), quiet))


def test_a_longer_budget_replaces_that_of_the_task_for_selected_documents(
    tmp_path: Path, writer: Callable[..., Model]
) -> None:
    model, task = writer(A, B, C, DOT), generation_task(tmp_path, n=12, max_new_tokens=3)
    short = score(model, task)
    assert {(row.ended, row.budgets) for row in short} == {(("length",), (3,))}
    rows = longer(model, task, [2, 7, 11], 6)
    assert [row.doc_id for row in rows] == [2, 7, 11]
    assert {(row.ended, row.answer_tokens, row.budgets) for row in rows} == {(("stop",), (4,), (6,))}
    prompts = {row.doc_id: row.prompt_hash for row in short}
    assert all(row.prompt_hash == prompts[row.doc_id] for row in rows)


@pytest.mark.story
def test_a_prompt_is_not_cut_to_make_room_for_a_longer_answer(tmp_path: Path, writer: Callable[..., Model]) -> None:
    model, task = writer(A, B, C), generation_task(tmp_path, max_gen_toks=4)
    lengths = {}
    for row in longer(model, task, range(40), 30, max_length=20):
        assert row.ended == ("context",)
        assert row.answer_tokens == row.budgets
        lengths[row.doc_id] = row.budgets[0]
    words = [json.loads(line)["word"] for line in (tmp_path / "data/letters.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    assert lengths == {doc: 20 - len(tokenizer(word)["input_ids"]) for doc, word in enumerate(words)}


@pytest.mark.story
def test_answers_are_lengthened_until_they_end_or_the_limit_is_reached(
    tmp_path: Path, writer: Callable[..., Model]
) -> None:
    endless, task = writer(A, B, C), generation_task(tmp_path / "tasks", max_gen_toks=4)
    for limit, doublings, budgets in (
        (None, 1, (4, 8)),
        (None, 9, (4, 8, 16, 32)),
        (10, 9, (4, 8, 10)),
        (4, 9, (4,)),
        (2, 9, (4,)),
    ):
        with separate_store(tmp_path / "state"):
            parts = evaluate_documents(endless, task, Scoring(), None, CPU)
            (part,) = lengthen_answers(endless, pin_data(task), Scoring(), parts, doublings, limit, CPU)
        rows = read_document_scores(part.directory / SCORES_FILE)
        assert {row.budgets for row in rows} == {budgets}
        assert all(row.never_ends(limit) == (budgets[-1] == 32) for row in rows)
        text = f"40 answers generated again with up to {budgets[-1]} tokens"
        assert (text in part.value.summary()) == (len(budgets) > 1)
