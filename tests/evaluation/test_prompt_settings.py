"""A guard's prompt settings have the same effect as the equivalent arguments of lm-eval's ``simple_evaluate``."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval_runs import run_lm_eval_here
from pydantic import ValidationError
from rich.console import Console
from scoring_runs import mean_of, model_in, pin, score, write_task
from tiny_models import make_model, words, write_choices

from mergegate.flows.cli.check import print_examples
from mergegate.flows.preflight import TaskExample
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.base.store.manifest import digest
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.definitions.support import require_effect
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.document_order import DocumentSplits
from mergegate.tasks.quality.evaluation.scoring.lm_eval_tasks import (
    BUDGET_NAMES,
    require_known_generation,
    room_for_prompt,
)
from mergegate.tasks.quality.evaluation.scoring.prompts import TaskPreview, TokenizerSource, _render
from mergegate.tasks.quality.evaluation.settings import PromptSettings, Scoring, resolve_prompt_settings
from mergegate.tasks.quality.gate.references import pin_tasks
from mergegate.tasks.quality.gate.settings import EvaluateSettings, Guard
from mergegate.tasks.sweep.trial_pool import SweepEvidence

TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
WRITTEN: dict[str, Any] = {"fewshot_split": "test", "output_type": "generate_until", "doc_to_text": "{{word}}"}
WRITTEN |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 6, "do_sample": False}, "doc_to_target": "{{answer}}"}
WRITTEN |= {"process_results": "!function scoring.share", "metric_list": [mean_of("share")]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a multiple-choice task, a generation task and a model with a chat template."""
    root, rng = tmp_path_factory.mktemp("asking"), random.Random(3)
    write_choices(root, 9, extra="fewshot_split: test\n")
    (root / "scoring.py").write_text(
        "def share(doc, results):\n    return {'share': sum(map(ord, results[0])) % 97 / 97}\n"  # of all characters
    )
    rows = [{"word": word, "answer": rng.choice("abcd")} for word in words(9, seed=2)]
    write_task(root, "written", rows, **WRITTEN)
    make_model(root / "model")
    (root / "model" / "chat_template.jinja").write_text(TEMPLATE)
    yield root
    unload_models()


def pinned(root: Path, *guards: dict[str, Any]) -> tuple[tuple[Guard, ...], tuple[EvalTask, ...]]:
    written = [Guard.model_validate({"guarded_by": "base", **guard}) for guard in guards]
    return pin_tasks(written, root, HashMemo(root / "hashes.db"))


def ours(root: Path, task: EvalTask) -> dict[tuple[str, int], tuple[str, float]]:
    """Return the prompt hash and the score by metric and document, scored in two parts."""
    rows = [row for part in ((0, 4), (4, 9)) for row in score(model_in(root / "model"), task, part)]
    return {(row.metric, row.doc_id): (row.prompt_hash, row.outcome) for row in rows if "prob" not in row.metric}


def theirs(root: Path, name: str, scratch: Path, said: dict[str, Any]) -> dict[tuple[str, int], tuple[str, float]]:
    (scratch / "include").mkdir(parents=True)
    shutil.copy(root / "scoring.py", scratch / "include")
    samples = run_lm_eval_here(root / "model", [root / f"{name}.yaml"], scratch, **said)[name]
    return {
        (f"{metric},{sample['filter']}", sample["doc_id"]): (sample["prompt_hash"], float(sample[metric]))
        for sample in samples
        for metric in sample["metrics"]
    }


KIND = {"system_instruction": "be kind"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("written", {"gen_kwargs": {"max_gen_toks": 3, "until": ["a", "."]}}),
        pytest.param("written", {"num_fewshot": 2, "apply_chat_template": True, **KIND}, marks=pytest.mark.story),
        pytest.param(
            "written",
            {"num_fewshot": 2, "apply_chat_template": True, "fewshot_as_multiturn": False},
            marks=pytest.mark.story,
        ),
        pytest.param("letters", {"num_fewshot": 3, **KIND}, marks=pytest.mark.story),
        ("letters", {"apply_chat_template": True, **KIND}),
    ],
)
def test_prompts_and_scores_are_those_of_lm_eval(root: Path, name: str, said: dict[str, Any], tmp_path: Path) -> None:
    _, (task,) = pinned(root, {"task": f"{name}.yaml", **said})
    assert ours(root, task) == theirs(root, name, tmp_path, said)


@pytest.mark.story
def test_one_task_with_two_prompt_settings_is_scored_under_each(root: Path, tmp_path: Path) -> None:
    """Both settings share one loaded task, and neither leaks into the other."""
    ways = {"written": {}, "written-short": {"gen_kwargs": {"max_gen_toks": 2}, "num_fewshot": 1}}
    guards, tasks = pinned(root, *({"task": "written.yaml", "name": name, **said} for name, said in ways.items()))
    assert [guard.task for guard in guards] == [task.name for task in tasks] == list(ways)
    found = [ours(root, task) for task in (*tasks, tasks[0])]
    assert found[0] == found[2] != found[1]
    assert found[:2] == [theirs(root, "written", tmp_path / name, said) for name, said in ways.items()]


def test_prompt_settings_of_a_guard_override_the_profile() -> None:
    of_all = Scoring(num_fewshot=5, chat_template=True)
    own = resolve_prompt_settings(PromptSettings(num_fewshot=0, apply_chat_template=False), of_all)
    assert (own.num_fewshot, own.is_chat, own.is_multiturn) == (0, False, False)
    assert resolve_prompt_settings(None, of_all).num_fewshot == 5
    assert resolve_prompt_settings(PromptSettings(fewshot_as_multiturn=False), of_all).is_multiturn is False


def test_prompt_settings_enter_only_the_keys_of_scores() -> None:
    plain = EvalTask(name="t", digest="0" * 64, definition=None)
    ways = [PromptSettings(num_fewshot=1), PromptSettings(num_fewshot=2), PromptSettings(gen_kwargs={"until": ("a",)})]
    asked = [plain.model_copy(update={"prompt_settings": way}) for way in ways]
    assert len({digest(each) for each in (plain, *asked)}) == 4
    guard = Guard(task="t", guarded_by="a")
    assert digest(guard) == digest(guard.model_copy(update={"num_fewshot": 5, "mean_over": "documents"}))


def test_the_preview_finds_an_instruction_that_the_template_drops(root: Path, tmp_path: Path) -> None:
    """lm-eval drops a system message that makes the template fail, and at most logs it."""
    shutil.copytree(root / "model", tmp_path / "model")
    _, (task,) = pinned(
        root, {"task": "letters.yaml", "apply_chat_template": True, "system_instruction": "be  kind", "num_fewshot": 1}
    )

    def shown() -> TaskPreview:
        place = TokenizerSource(name="chatty", directory=tmp_path / "model", digest="0")
        return _render(task, Scoring(), place, lambda done, of: None)

    assert shown().prompt.startswith("s:be  kind.u:")
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(no_system + TEMPLATE)
    with pytest.raises(InvalidInput, match="the chat template of chatty drops it"):
        shown()


def test_check_shows_the_prompt_of_a_task() -> None:
    asked = PromptSettings(num_fewshot=2, apply_chat_template=True, gen_kwargs={"temperature": 0.5, "do_sample": True})
    seen = TaskPreview(leaf="t", prompt="1 + 1?", answer="2", tokens=4)
    console = Console(record=True, width=200)
    print_examples([TaskExample("t", "base", seen, asked.describe())], console)
    settings = "num_fewshot 2, chat template, gen_kwargs do_sample=True temperature=0.5"
    assert f"task t ({settings}): first sampled document, as base" in console.export_text()


def test_a_sweep_leaves_other_documents_for_the_gate_under_any_task_name(root: Path) -> None:
    division = DocumentSplits(search=4, confirmation=2)
    task = pin(root / "letters.yaml")
    swept = SweepEvidence({"letters.yaml": "letters"}, (task,), {"letters": division}, None, division)
    _, tasks = pinned(root, {"task": "letters.yaml", "name": "again", "num_fewshot": 1}, {"task": "letters.yaml"})
    assert [each.only for each in swept.gate_tasks(tasks)] == [division.of("gate")] * 2


@pytest.mark.parametrize(
    "said",
    [
        {"num_fewshot": "5"}, {"num_fewshot": True}, {"num_fewshot": -1}, {"gen_kwargs": {}},
        {"gen_kwargs": "temperature=0.7"}, {"gen_kwargs": {"temperature": float("nan")}},
        {"gen_kwargs": {"num_return_sequences": 2}}, {"apply_chat_template": "default"}, {"system_instruction": ""},
        {"apply_chat_template": False, "fewshot_as_multiturn": True}, {"fewshot_as_multiturn": True},
        {"name": "two words"},
    ],
)  # fmt: skip
def test_contradictory_prompt_settings_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EvaluateSettings.model_validate({"tasks": [{"task": "gsm8k", "guarded_by": "a", **said}]})


def test_two_prompt_settings_under_one_name_are_refused(root: Path) -> None:
    with pytest.raises(InvalidInput, match="num_fewshot 2 and the profile's prompts") as refused:
        pinned(root, {"task": "letters.yaml", "num_fewshot": 2}, {"task": "letters.yaml"})
    assert "name: letters-2" in refused.value.remedy


def test_prompt_settings_without_effect_are_refused(root: Path) -> None:
    with pytest.raises(InvalidInput, match="but the task has none"):
        require_effect("letters.yaml", PromptSettings(gen_kwargs={"max_gen_toks": 3}), root)
    write_task(root, "none", include="written.yaml", num_fewshot=0)
    with pytest.raises(InvalidInput, match="although the task sets 0"):
        require_effect("none.yaml", PromptSettings(num_fewshot=2), root)
    require_effect("none.yaml", PromptSettings(num_fewshot=0, gen_kwargs={"max_gen_toks": 3}), root)


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"max_gen_toks": 5, "temprature": 0.5}, r"temprature(.*\n)*.*temperature"),
        ({"batch_size": 4}, r"set evaluate\.batch_size instead"),
    ],
)
def test_an_error_names_an_unknown_generation_setting_or_where_it_belongs(
    gen_kwargs: dict[str, float], message: str
) -> None:
    how = resolve_prompt_settings(PromptSettings(gen_kwargs=gen_kwargs), Scoring())
    with pytest.raises(InvalidInput, match=message):
        require_known_generation(how, "hf", "t")


@pytest.mark.parametrize("key", ["enable_thinking", "think_end_token", "chat_template_args"])
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_an_argument_of_lm_evals_models_is_not_a_setting_of_generation(key: str, backend: str) -> None:
    how = resolve_prompt_settings(PromptSettings(gen_kwargs={key: "x"}), Scoring())
    with pytest.raises(InvalidInput, match=rf"gen_kwargs\.{key}(.*\n)*.*set evaluate\.{key} instead"):
        require_known_generation(how, backend, "t")
    plain = resolve_prompt_settings(None, Scoring())
    with pytest.raises(InvalidInput, match=rf"task leaf: generation_kwargs\.{key}"):
        require_known_generation(plain, backend, "t", {"leaf": {"until": [], key: "x"}, "choice": None})


def room(own: dict[str, Any], gen_kwargs: dict[str, Any], context: int | None) -> int | None:
    how = resolve_prompt_settings(PromptSettings(gen_kwargs=gen_kwargs) if gen_kwargs else None, Scoring())
    return room_for_prompt(SimpleNamespace(generation={"t": own}), "t", how, context)  # type: ignore[arg-type]


BUDGETS = st.dictionaries(st.sampled_from(BUDGET_NAMES), st.integers(1, 600), max_size=3)


@settings(max_examples=40)
@given(own=BUDGETS, gen_kwargs=BUDGETS, context=st.integers(2, 600))
def test_answers_leave_room_for_the_prompt_under_every_name_of_lm_eval(
    own: dict[str, Any], gen_kwargs: dict[str, Any], context: int
) -> None:
    """The reference is lm-eval's own parsing. The profile's setting replaces the task's, under any name."""
    budget = normalize_gen_kwargs(gen_kwargs or own, 256)["max_gen_toks"]
    if budget < context:  # asserted by HFLM
        assert room(own, gen_kwargs, context) == context - budget
    else:
        with pytest.raises(InvalidInput, match=f"{budget:,} tokens.*may have {context:,}"):
            room(own, gen_kwargs, context)
    assert room(own, gen_kwargs, None) is None


@pytest.mark.parametrize("value", ["many", 0, -1, True, 1.5e308 * 10, float("nan"), [], {}])
@pytest.mark.parametrize("key", ["max_gen_toks", "max_new_tokens", "max_length"])
def test_a_budget_that_is_not_a_number_of_tokens_is_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=rf"task t: generation_kwargs\.{key}: .*\n  expected: a number of tokens"):
        room({key: value}, {}, None)


def test_prompt_and_answer_together_fit_into_the_context() -> None:
    assert room({"max_gen_toks": 4, "max_length": 64}, {}, 64) == 60
    with pytest.raises(InvalidInput, match=r"max_length: 65 tokens"):
        room({"max_gen_toks": 4, "max_length": 65}, {}, 64)


def test_a_preview_compares_the_longest_answer_with_the_models_context(root: Path, tmp_path: Path) -> None:
    """The model's context is 64 tokens."""
    make_model(tmp_path / "model")
    place = TokenizerSource(name="m", directory=tmp_path / "model", digest="")

    def shown(tokens: int, **scoring: Any) -> TaskPreview:
        path = write_task(root, "long", include="written.yaml", generation_kwargs={"max_tokens": tokens})
        return _render(pin(path), Scoring(**scoring), place, lambda done, of: None)

    assert shown(60).room == 4
    message = r"task long: generation_kwargs\.max_tokens: 64 tokens; prompt and answer together may have 64"
    with pytest.raises(InvalidInput, match=message):
        shown(64)
    assert shown(64, max_length=80).room == 16
    with pytest.raises(InvalidInput, match="prompt and answer together may have 32"):
        shown(40, max_length=32)
