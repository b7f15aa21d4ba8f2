"""A thinking model is scored on its answer, and the length of its thought is recorded, by every backend."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval_runs import run_lm_eval_here
from openai_server import serving
from pydantic import ValidationError
from samples import sampled, sampled_rows
from scoring_runs import mean_of, model_in, pin, score, write_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergegate.merge_core.checkpoint import find_thinking
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.backends import AnswerEnd, ThoughtEnd, find_thought_end, vllm
from mergegate.tasks.quality.evaluation.backends.answer_ends import answer_end
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.scores import answer_ends, prompt_cuts
from mergegate.tasks.quality.evaluation.settings import PromptSettings, Scoring, check_thinking, resolve_prompt_settings
from mergegate.tasks.quality.gate.settings import EvaluateSettings

DEMO = Path(__file__).resolve().parents[2] / "profiles/demo"
THINKER = DEMO / "models/thinker"
DOCUMENTS = 24
WORDS = [json.loads(line) for line in (DEMO / "data/reverse.jsonl").read_text().splitlines()[:DOCUMENTS]]


@pytest.fixture(autouse=True)
def nothing_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(vllm, "_engine", None)
    yield
    unload_models()


def thinker() -> Model:
    return model_in(THINKER, "thinker")


def words_task(directory: Path, until: Sequence[str] = ("\n",), budget: int = 80, **own: Any) -> EvalTask:
    """Write and pin a task with the first words of the demo, which a model reverses in its answer."""
    settings: dict[str, Any] = {"output_type": "generate_until", "metric_list": [mean_of("exact_match")]}
    settings["target_delimiter"] = ""
    settings["generation_kwargs"] = {"until": list(until), "max_gen_toks": budget, "do_sample": False}
    path = write_task(directory, "words", WORDS, doc_to_text="{{prompt}}", doc_to_target="{{answer}}", **settings | own)
    return pin(path)


def scored(task: EvalTask, **scoring: Any) -> list[DocumentScore]:
    rows = score(thinker(), task, (0, DOCUMENTS), **{"batch_size": 5, **scoring})
    return sorted(rows, key=lambda row: row.doc_id)


class Written(NamedTuple):
    """An answer by plain transformers, one prompt at a time."""

    ids: list[int]  # with the end-of-text token
    text: str


@cache
def written(prompt: str, budget: int) -> Written:
    tokenizer, network = AutoTokenizer.from_pretrained(THINKER), AutoModelForCausalLM.from_pretrained(THINKER)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        new = network.float().generate(ids, max_new_tokens=budget, do_sample=False)[0, ids.shape[1] :].tolist()
    return Written(new, tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.story
@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_scores_equal_those_of_lm_eval_with_the_same_arguments(tmp_path: Path, enable_thinking: bool | None) -> None:
    task = words_task(tmp_path / "task")
    assert task.definition is not None
    thinking: dict[str, Any] = {"think_end_token": "z", "enable_thinking": enable_thinking}
    lm = HFLM(pretrained=str(THINKER), device="cpu", dtype="float32", batch_size=5, **thinking)
    theirs = run_lm_eval_here(lm, [task.definition], tmp_path, apply_chat_template=True)["words"]
    samples = {sample["doc_id"]: sample for sample in theirs}
    rows = scored(task, dtype="float32", chat_template=True, **thinking)
    assert len(rows) == DOCUMENTS
    for row in rows:
        sample = samples[row.doc_id]
        assert (row.outcome, row.answer) == (sample["exact_match"], sample["filtered_resps"][0])
        assert row.prompt_hash == sample["prompt_hash"]
    mean = sum(row.outcome for row in rows) / DOCUMENTS
    assert mean < 0.5 if enable_thinking is False else mean == 1.0
    assert all((row.thinking_tokens == (0,)) == (enable_thinking is False) for row in rows)


class FakeEngine:
    """vLLM's engine, as lm-eval calls it, computed by transformers."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(THINKER)

    def generate(self, prompts: list[dict[str, Any]], sampling_params: list[Any], **_: Any) -> list[Any]:
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            answer = written(self.tokenizer.decode(prompt["prompt_token_ids"]), params.max_tokens)
            ids, text, reason, by = answer.ids, answer.text, "length", None
            if ids[-1] == self.tokenizer.eos_token_id:
                reason = "stop"
            for stop in params.stop:
                if stop in text:
                    text, reason, by = text.split(stop)[0], "stop", stop
                    ids = ids[: len(text) + len(stop)]
            output = SimpleNamespace(text=text, token_ids=ids, finish_reason=reason, stop_reason=by)
            outputs.append(SimpleNamespace(outputs=[output]))
        return outputs


@cache
def lm_evals_vllm() -> Any:
    """Import lm-eval's module for vLLM without vLLM."""
    parts: dict[str, dict[str, Any]] = {"vllm.lora.request": {"LoRARequest": None}, "vllm.lora": {}}
    parts["vllm"] = {"LLM": None, "SamplingParams": type("Params", (SimpleNamespace,), {}), "TokensPrompt": dict}
    parts["vllm.tokenizers"] = {"get_tokenizer": None}
    modules = {name: types.ModuleType(name) for name in parts}
    for name, module in modules.items():
        vars(module).update(parts[name])

    def version_of(name: str) -> str:
        return "0.1" if name == "vllm" else version(name)

    with mock.patch.dict(sys.modules, modules), mock.patch("importlib.metadata.version", version_of):
        return importlib.import_module("lm_eval.models.vllm_causallms")


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run lm-eval's own vLLM class on ``FakeEngine``."""

    def opened(self: Any, **_: Any) -> None:
        self.model = FakeEngine()
        self.tokenizer = self.model.tokenizer
        self._rank, self._world_size, self._config, self.hf_chat_template = 0, 1, None, None
        self.data_parallel_size, self.lora_request, self.batch_size = 1, None, 5
        self._max_length, self._max_gen_toks, self.truncation_side = 128, 256, "left"
        self.add_bos_token = self.custom_prefix_token_id = self.enable_thinking = None

    module = lm_evals_vllm()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(module.VLLM, "__init__", opened)


@pytest.mark.proof
@pytest.mark.parametrize("budget", [80, *(pytest.param(other, marks=pytest.mark.proof) for other in (40, 12))])
@pytest.mark.parametrize("until", sampled([("\n",), (" ",), ("c", "z")], [("c", "z")], pytest.mark.proof))
@pytest.mark.usefixtures("fake_vllm")
def test_every_backend_records_the_same_thoughts_and_answers(tmp_path: Path, until: Sequence[str], budget: int) -> None:
    """The reference is a search in the text of plain transformers. In the demo family, a character is a token."""
    task = words_task(tmp_path, until, budget)
    found = {"hf": scored(task, think_end_token="z"), "vllm": scored(task, backend="vllm", think_end_token="z")}
    with serving({"thinker": thinker()}) as server:
        found["served"] = scored(task, backend="served", server={"url": server.url}, think_end_token="z")
    for backend, rows in found.items():
        assert len(rows) == DOCUMENTS
        for row in rows:
            answer = written(WORDS[row.doc_id]["prompt"], budget)
            thought, end, rest = answer.text.partition("z")
            stops = [at for stop in until if (at := rest.find(stop)) >= 0]
            if not end:
                expected = ("", ("length",), budget, budget)  # cut off within the thought: no answer
            elif stops:
                expected = (rest[: min(stops)], ("stop",), len(thought) + 1 + min(stops) + 1, len(thought) + 1)
            else:
                kind = "eos" if answer.ids[-1] == 2 else "length"
                expected = (rest, (kind,), len(answer.ids), len(thought) + 1)
            reason = row.ended if backend != "served" or row.ended != ("stop",) else expected[1]  # cannot tell eos
            assert (row.answer, reason, row.answer_tokens[0], row.thinking_tokens[0]) == expected, backend
            assert row.outcome == (expected[0] == WORDS[row.doc_id]["answer"])


def lengths_and_cuts(
    task: EvalTask, backend: str, texts: list[str], room: int, **scoring: Any
) -> tuple[list[DocumentScore], int]:
    """Check the number of tokens that each prompt lost, and return the scores and the number of such prompts."""
    with serving({"thinker": thinker()}) as server:
        own = {"server": {"url": server.url}} if backend == "served" else {}
        rows = scored(task, backend=backend, **own, **scoring)
        sent = [prompt for body in server.bodies[1:] for prompt in body["prompt"]]
    assert [row.prompt_cut for row in rows] == [max(0, len(text) - room) for text in texts]
    if sent:  # what the server received, independently of how mergegate counts
        assert sorted(map(len, sent)) == sorted(min(len(text), room) for text in texts)
    return rows, sum(len(text) > room for text in texts)


@pytest.mark.story
@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("backend", ["hf", "vllm", "served"])
@pytest.mark.parametrize(
    ("max_length", "budget"), sampled_rows([(128, 80), (60, 48), (20, 10), (14, 12)], [(20, 10)], pytest.mark.proof)
)
def test_tokens_removed_from_a_prompt_are_counted(tmp_path: Path, backend: str, max_length: int, budget: int) -> None:
    room = {"hf": max_length, "served": max_length - 1, "vllm": 128}[backend] - budget  # the fake vLLM has 128
    texts = [word["prompt"] for word in WORDS]
    task = words_task(tmp_path, budget=budget)
    rows, cut = lengths_and_cuts(task, backend, texts, room, max_length=max_length, batch_size=7)
    (cuts,) = prompt_cuts("t", rows).values()
    assert (cuts.documents, cuts.cut) == (DOCUMENTS, cut)


@pytest.mark.story
@pytest.mark.parametrize(("backend", "max_length"), list(product(("hf", "served"), (128, 16, 13))))
def test_tokens_removed_from_a_scored_prompt_are_counted(tmp_path: Path, backend: str, max_length: int) -> None:
    task = words_task(tmp_path, output_type="loglikelihood", metric_list=[mean_of("acc")], generation_kwargs=None)
    texts = [word["prompt"] + word["answer"] for word in WORDS]
    room = max_length + 1 if backend == "hf" else max_length - 1
    lengths_and_cuts(task, backend, texts, room, max_length=max_length)


@settings(max_examples=60)
@given(
    text=st.text("ab z", max_size=14),
    stop=st.lists(st.sampled_from(["", " ", "a", "bb", "z"]), max_size=3),
    has_eos=st.booleans(),
    is_expected=st.booleans(),
    is_token=st.booleans(),
)
def test_a_thought_ends_at_the_last_end_token_before_the_answer_stops(
    text: str, stop: list[str], has_eos: bool, is_expected: bool, is_token: bool
) -> None:
    """The reference adds one token at a time, and then applies lm-eval's own rule to the text."""
    ids = [ord(letter) for letter in (text + "$" if has_eos else text) or "a"]
    generated = "".join(map(chr, ids))
    thought_end = ThoughtEnd("z", ord("z") if is_token else None, is_expected)

    def decode(tokens: list[int]) -> list[str]:
        return ["".join(map(chr, tokens)).removesuffix("$")]

    count, reason = len(ids), "eos" if has_eos else "length"
    for length in range(1, len(generated) + 1):
        _, end, after = generated[:length].removesuffix("$").partition("z")
        searched = after.lstrip() if is_expected else generated[:length].removesuffix("$")
        if (end or not is_expected) and any(string in searched for string in stop if string):
            count, reason = length, "stop"
            break
    kept = generated[:count].removesuffix("$")
    thinking = kept.rindex("z") + 1 if "z" in kept else count if is_expected and reason == "length" else 0
    end = answer_end(ids, {ord("$")}, stop, decode, len(ids), thought_end)
    assert end == AnswerEnd(reason, count, thinking)  # type: ignore[arg-type]
    assert end.is_unfinished_thought == (reason == "length" and thinking == count > 0)
    answer = postprocess_generated_text(kept, stop, "z")
    cut = thought_end.without_tail(generated.removesuffix("$"), stop)
    if is_expected and "z" not in stop:  # lm-eval itself takes a stop string that ends thoughts for another thought
        assert postprocess_generated_text(cut, stop, "z") == answer


@pytest.mark.proof
def test_a_summary_names_thoughts_and_those_that_never_end(tmp_path: Path) -> None:
    rows = scored(words_task(tmp_path, budget=20), think_end_token="z")
    (ends,) = answer_ends("t", rows).values()
    lengths = [min(20, len(written(word["prompt"], 80).ids)) for word in WORDS]
    unfinished = sum("z" not in written(word["prompt"], 20).text for word in WORDS)
    assert (ends.measured, ends.tokens, ends.unfinished_thoughts) == (DOCUMENTS, sum(lengths), unfinished)
    assert f"{unfinished} of {DOCUMENTS} answers end within a thought" in ends.describe_length()
    assert 0 < unfinished < DOCUMENTS


@pytest.mark.proof
def test_the_end_of_a_thought_may_be_a_token_id(tmp_path: Path) -> None:
    task = words_task(tmp_path)
    token = AutoTokenizer.from_pretrained(THINKER).convert_tokens_to_ids("z")
    by_id, by_digits, by_text = (scored(task, think_end_token=end) for end in (token, str(token), "z"))
    assert by_id == by_digits == by_text
    with pytest.raises(InvalidInput, match="think_end_token"):
        scored(task, think_end_token=34)


def test_a_special_token_that_ends_a_thought_is_found_by_its_id() -> None:
    tokenizer = AutoTokenizer.from_pretrained(THINKER)
    assert find_thought_end("<s>", None, tokenizer) == ThoughtEnd("<s>", tokenizer.bos_token_id)
    assert find_thought_end("z", False, tokenizer) == ThoughtEnd("z", None, is_expected=False)
    assert find_thought_end(None, None, tokenizer) is None


def test_a_server_cannot_send_a_special_token(tmp_path: Path) -> None:
    with serving({"thinker": thinker()}) as server, pytest.raises(InvalidInput, match="special token"):
        scored(words_task(tmp_path), backend="served", server={"url": server.url}, think_end_token="<s>")


def test_settings_of_a_task_override_those_of_the_profile() -> None:
    arguments = {"effort": "low", "a": 1}
    thinking: dict[str, Any] = {"enable_thinking": True, "think_end_token": "</think>"}
    scoring = Scoring(chat_template=True, chat_template_args=arguments, **thinking)
    own = PromptSettings(enable_thinking=False, chat_template_args={"effort": "high"})
    resolved = resolve_prompt_settings(own, scoring)
    assert resolved.template_arguments == {"effort": "high", "a": 1, "enable_thinking": False}
    assert resolved.think_end_token == "</think>"
    assert resolve_prompt_settings(PromptSettings(apply_chat_template=False), scoring).template_arguments == {}
    assert own.describe() == "no thinking, chat_template_args effort=high"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": True, "enable_thinking": True}, "enable_thinking requires think_end_token"),
        ({"enable_thinking": False}, "enable_thinking requires a chat template"),
        ({"chat_template_args": {"a": 1}}, "chat_template_args requires a chat template"),
        ({"chat_template": True, "chat_template_args": {"enable_thinking": True}}, "setting of its own"),
        ({"chat_template": True, "chat_template_args": {"tokenize": True}}, "mergegate sets 'tokenize' itself"),
        ({"think_end_token": ""}, "at least 1 character"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str) -> None:
    task = {"task": "gsm8k", "guarded_by": "base"}
    own = {name: value for name, value in settings.items() if name != "chat_template"}
    profile = {"chat_template": settings.get("chat_template", False)}
    for evaluate in ({**settings, "tasks": [task]}, {**profile, "tasks": [{**task, **own}]}):
        with pytest.raises(ValidationError, match=message):
            EvaluateSettings.model_validate(evaluate)


def test_absent_settings_do_not_change_a_key() -> None:
    from mergegate.tasks.base.store.manifest import canonical

    names = {"enable_thinking", "think_end_token", "chat_template_args"}
    assert not names & canonical(Scoring()).keys()
    assert not names & canonical(PromptSettings(num_fewshot=1)).keys()
    assert canonical(Scoring(enable_thinking=False))["enable_thinking"] is False
    check_thinking("t", None, Scoring())


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("{{ m.content.split('</think>')[-1] }}{% if enable_thinking is false %}", (), ("</think>", True)),  # Qwen3
        ("{% set content = content.split('</think>')[-1] %}", (), ("</think>", False)),  # DeepSeek-R1
        ("{{ m.content }}", ("a", "[/THINK]"), ("[/THINK]", False)),
        ((THINKER / "chat_template.jinja").read_text(), ("z",), ("z", True)),
        ("{% if enable_thinking %}", (), ("", True)),
        ("{{ m.content.split('z')[-1] }}", ("a",), None),
        (None, ("</think>",), None),  # a base model
    ],
)
def test_a_thinking_model_is_recognized_by_its_template_and_vocabulary(
    template: str | None, tokens: tuple[str, ...], expected: tuple[str, bool] | None
) -> None:
    assert find_thinking(template, tokens) == expected
