"""Answers are greedy like those of plain transformers, identical for both models, and generated turn by turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scoring_runs import call_here
from tiny_models import CPU, make_model, words, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import sha256_file
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.judge.answers import AnswerSummary, ConversationAnswers, Prompts, answer, read_answers
from mergegate.tasks.quality.judge.settings import Generation

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}. {% endfor %}a:"


@pytest.fixture(autouse=True)
def no_other_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("mergegate.tasks.quality.judge.answers.call_model_process", call_here)
    yield
    unload_models()


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_model(tmp_path / "model", seed=3)


def ask(
    tmp_path: Path, model: Model, turns: list[list[str]], **generation: Any
) -> tuple[AnswerSummary, dict[str, ConversationAnswers]]:
    path = write_jsonl(tmp_path / "prompts.jsonl", ({"turns": turn} for turn in turns))
    prompts = Prompts(path=path, sha256=sha256_file(path))
    settings = Generation.model_validate({"max_new_tokens": 8, "chat_template": False, **generation})
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    return answer.work(out, model, prompts, settings, CPU), read_answers(out)


def greedy(model: Model, text: str, most: int, special: bool = True) -> tuple[str, bool]:
    """Generate the most likely token repeatedly, for one prompt at a time and without a cache."""
    network = AutoModelForCausalLM.from_pretrained(model.directory)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    start = tokenizer(text, add_special_tokens=special).input_ids
    ids = list(start)
    while len(ids) < len(start) + most and (len(ids) == len(start) or ids[-1] != tokenizer.eos_token_id):
        with torch.inference_mode():
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    answer = str(tokenizer.decode(ids[len(start) :], skip_special_tokens=True))
    return answer.strip(), ids[-1] != tokenizer.eos_token_id


@pytest.mark.story
def test_answers_are_the_greedy_ones_in_any_batch(tmp_path: Path, model: Model) -> None:
    asked = words(12, seed=1)
    wanted = [greedy(model, word, 8) for word in asked]
    for batch_size in (1, 5):
        value, found = ask(tmp_path, model, [[word] for word in asked], batch_size=batch_size)
        assert [(each.answers[0], each.cut_off[0]) for each in found.values()] == wanted
        assert list(found) == [str(n + 1) for n in range(12)]
        assert value.cut_off == sum(cut for _, cut in wanted)
        assert value.characters == sum(len(text) for text, _ in wanted)
        assert 0 < value.cut_off < 12  # Some answers end by themselves and some do not, so this check can fail.


@pytest.mark.story
def test_the_second_turn_follows_the_answer_to_the_first(tmp_path: Path, model: Model) -> None:
    _, found = ask(tmp_path, model, [["abc", "def"], ["once only"]])
    first, second = found["1"].answers
    assert first == greedy(model, "abc", 8)[0]
    conversation = "\n\n".join(piece for piece in ("abc", first, "def") if piece)
    assert second == greedy(model, conversation, 8)[0]
    assert len(found["2"].answers) == 1


@pytest.mark.story
def test_the_chat_template_is_applied_once(tmp_path: Path, model: Model) -> None:
    (model.directory / "chat_template.jinja").write_text(TEMPLATE)
    _, found = ask(tmp_path, model, [["abc", "def"], ["gh"]], chat_template=True)
    first = greedy(model, "u: abc. a:", 8, special=False)[0]
    assert found["1"].answers == (first, greedy(model, f"u: abc. a: {first}. u: def. a:", 8, special=False)[0])
    assert found["2"].answers == (greedy(model, "u: gh. a:", 8, special=False)[0],)


def test_a_missing_chat_template_is_reported_with_a_remedy(tmp_path: Path, model: Model) -> None:
    with pytest.raises(InvalidInput, match=r"judge\.chat_template(.*\n)*.*chat_template: false"):
        ask(tmp_path, model, [["abc"], ["def"]], chat_template=True)


@pytest.mark.story
def test_the_models_own_sampling_and_penalties_play_no_part(tmp_path: Path, model: Model) -> None:
    asked = [[word] for word in words(6, seed=2)]
    _, plain = ask(tmp_path, model, asked)
    config = json.loads((model.directory / "generation_config.json").read_text())
    config |= {"do_sample": True, "temperature": 9.0, "top_k": 0, "repetition_penalty": 9.0, "num_beams": 3}
    (model.directory / "generation_config.json").write_text(json.dumps(config))
    unload_models()
    assert ask(tmp_path, model, asked)[1] == plain


def test_an_error_names_a_prompt_that_fills_the_context(tmp_path: Path, model: Model) -> None:
    with pytest.raises(InvalidInput, match=r"prompt 2: 71 tokens"):
        ask(tmp_path, model, [["abc"], ["a" * 70]])


def test_an_answer_ends_where_the_context_ends(tmp_path: Path, model: Model) -> None:
    _, found = ask(tmp_path, model, [["a" * 60], ["abc"]], max_new_tokens=500, batch_size=1)
    assert found["1"].answers == (greedy(model, "a" * 60, 64 - 61)[0],)  # One of the 64 tokens begins the text.
