"""Code tasks run only if they are allowed by name, and their scores match the published pass@k estimator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from confined_here import require_confinement
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scoring_runs import backend_site, model_in, pin, quiet, scoring_job, write_task
from tiny_models import write_jsonl

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.base.sandbox import ProgramLimits
from mergegate.tasks.models.checkpoints import Model
from mergegate.tasks.quality.evaluation import EvalTask, pin_task
from mergegate.tasks.quality.evaluation.definitions.code import CodeEval, allow_code, pass_at
from mergegate.tasks.quality.evaluation.definitions.support import UnsupportedReason, refusal_of, require_supported
from mergegate.tasks.quality.evaluation.definitions.tree import task_tree
from mergegate.tasks.quality.evaluation.scoring.harness import score_in_child
from mergegate.tasks.quality.evaluation.scoring.loading import inspect_in_child
from mergegate.tasks.quality.gate import EvaluateSettings, Guard, pin_tasks

QUICK = ProgramLimits(cpu=1, clock=20, memory=1 << 29)

# The model's answers for a function that should return 1, and their scores.
ANSWERS = {
    "right": ("    return 1", 1.0),
    "wrong": ("    return 2", 0.0),
    "leaves": ("    import os; os._exit(0)", 0.0),
    "loops": ("    while True: pass", 0.0),
    "forks": ("    import os\n    while True: os.fork()", 0.0),
    "eats": ("    return len(bytearray(4 << 30)) and 1", 0.0),
    "calls": ("    import socket; socket.socket(); return 1", 0.0),
    "tells": ("    import os; return 1 if os.environ['HF_TOKEN'] else 2", 0.0),
    "writes": ("    open(HOME + '/taken', 'w'); return 1", 0.0),
}

WHOLE = {"whole": ("def whole(): return 1\n", 1.0), "half": ("def half(): return 0.5\n", 0.0)}

CODER = '''
import json
from contextlib import contextmanager
from mergegate.tasks.quality.evaluation import Backend
ANSWERS = json.loads({answers!r})

@contextmanager
def opened(model, scoring, device):
    """Says what stands in the table under the name of the function that it is to write."""
    from lm_eval.api.model import LM

    class Coder(LM):
        tokenizer = None

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

        def generate_until(self, requests):
            return [ANSWERS[next(name for name in ANSWERS if name in request.args[0])] for request in requests]

    yield Coder()

BACKEND = Backend("extra", "writes what it is told", opened)
'''


def mirror(place: Path, home: Path) -> Path:
    """Write a directory for ``evaluate.data`` with small versions of HumanEval and MBPP."""
    humaneval = {"canonical_solution": "    return 1", "test": "def check(function):\n    assert function() == 1\n"}
    write_jsonl(
        place / "humaneval_test.jsonl",
        (
            {"task_id": f"own/{name}", "prompt": f"HOME = {str(home)!r}\ndef {name}():\n", "entry_point": name}
            | humaneval
            for name in ANSWERS
        ),
    )
    write_jsonl(
        place / "mbpp_test.jsonl",
        (
            {"task_id": at, "text": f"Write {name}.", "code": "", "test_list": [f"assert {name}() == 1"] * 3}
            for at, name in enumerate(WHOLE)
        ),
    )
    return place


def pinned(name: str, data: Path) -> EvalTask:
    task = allow_code(pin_task(name, data, HashMemo(data.parent / "hashes.db"), data), name, [name])
    return task.model_copy(update={"code": QUICK})


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_that_have_a_right_answer(drawn: tuple[int, int, int]) -> None:
    n, passed, k = drawn
    draws = list(combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at(k, n, passed) == pytest.approx(float(Fraction(sum(map(any, draws)), len(draws))), abs=1e-12)


@pytest.mark.story
def test_the_replacement_scores_like_code_eval() -> None:
    require_confinement()
    right, wrong = "def add(a, b): return a + b", "def add(a, b): return a * b"
    means, outcomes = CodeEval(QUICK).compute(
        references=["assert add(2, 3) == 5"] * 2, predictions=[[right, wrong], [wrong, wrong]], k=[1, 2, 10]
    )
    assert means == {"pass@1": 0.25, "pass@2": 0.5}  # no document has ten answers
    assert [said["passed"] for _, said in outcomes[0]] == [True, False]
    assert outcomes[1][1] == (1, {"task_id": 1, "passed": False, "result": "failed", "completion_id": 1})


@pytest.mark.parametrize(
    ("allowed", "found", "remedy"),
    [
        ([], "runs code generated by the model", "allow_code: [humaneval]"),
        (["humaneval", "gsm8k"], "runs no code", "remove it from allow_code"),
    ],
)
def test_code_runs_only_for_tasks_in_allow_code(tmp_path: Path, allowed: list[str], found: str, remedy: str) -> None:
    guards = [Guard(task=name, guarded_by="base") for name in ("humaneval", "gsm8k")]
    with pytest.raises(InvalidInput, match=found) as caught:
        pin_tasks(guards, tmp_path, HashMemo(tmp_path / "h.db"), None, allowed)
    assert remedy in caught.value.remedy


def test_a_name_that_is_not_evaluated_is_a_mistake() -> None:
    said: dict[str, Any] = {"tasks": [{"task": "humaneval", "guarded_by": "base"}]}
    assert EvaluateSettings.model_validate({**said, "allow_code": ["humaneval"]}).allow_code == ("humaneval",)
    with pytest.raises(ValidationError, match=r"'humanevil' is allowed .* did you mean 'humaneval'"):
        EvaluateSettings.model_validate({**said, "allow_code": ["humanevil"]})


def test_code_limits_are_part_of_the_key(tmp_path: Path) -> None:
    plain = pin_task("humaneval", tmp_path, HashMemo(tmp_path / "h.db"))
    task = allow_code(plain, "humaneval", ["humaneval"])
    longer = task.model_copy(update={"code": ProgramLimits(cpu=60)})
    keys = [json.dumps(each.content_key(), sort_keys=True) for each in (plain, task, longer)]
    assert len(set(keys)) == 3
    assert "code" not in keys[0]  # cached evaluations without code keep their keys


def test_unconfined_tasks_are_found_by_the_code_they_reach() -> None:
    refusals = {
        leaf.name: refusal
        for name in ("humaneval_64_instruct", "mbpp_plus", "cruxeval_input_cot", "longproc")
        for leaf in task_tree(name).leaves
        if (refusal := refusal_of(leaf.config, code_allowed=True))
    }
    families = {name.rpartition("_")[0] for name in refusals}
    # These run eval() and g++ in the process that holds the models.
    assert families == {"longproc_countdown", "longproc_pseudo_to_code"}
    assert {refusal.reason for refusal in refusals.values()} == {UnsupportedReason.UNCONFINED_CODE}


def test_a_shipped_code_task_is_refused_with_the_setting_that_allows_it() -> None:
    with pytest.raises(InvalidInput, match="humaneval_infilling") as caught:
        require_supported("humaneval_infilling")
    assert "allow_code: [humaneval_infilling]" in caught.value.remedy
    require_supported("humaneval_infilling", code_allowed=True)


@pytest.mark.parametrize(
    ("function", "own", "refusal"),
    [
        ("own.scored", "def scored(doc, results): exec(results[0])\n", r"exec in own.py"),
        ("pdb.run", "", r"pdb.run, in a module that is not next to"),
        (
            "own.scored",
            "def check_correctness(program): return run(program)\ndef run(program): exec(program)\n"
            "def scored(doc, results): return {'passed': check_correctness(results[0])}\n",
            None,
        ),
    ],
)
def test_a_local_task_runs_programs_confined_or_is_refused(
    tmp_path: Path, function: str, own: str, refusal: str | None
) -> None:
    config = {"unsafe_code": True, "output_type": "generate_until", "process_results": f"!function {function}"}
    path = write_task(tmp_path, "t", [{"a": 1}], **config)
    (tmp_path / "own.py").write_text(own)
    if refusal is None:
        assert allow_code(pin(path), "t.yaml", ["t.yaml"]).code
        return
    with pytest.raises(InvalidInput, match=refusal):
        allow_code(pin(path), "t.yaml", ["t.yaml"])


@pytest.fixture
def coder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """Return a model that writes the code in ``ANSWERS``, in this process and in the evaluation process."""
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    with backend_site(tmp_path / "site") as install_backend:
        install_backend(CODER.format(answers=json.dumps({name: text for name, (text, _) in (WHOLE | ANSWERS).items()})))
        yield model_in(tmp_path, "coder")


@pytest.mark.story
@pytest.mark.usefixtures("home")
def test_each_document_is_scored_by_what_its_program_does(tmp_path: Path, coder: Model) -> None:
    require_confinement()
    owner = Path.home()
    task = pinned("humaneval", mirror(tmp_path / "data", owner))
    assert inspect_in_child(task).metrics == {"humaneval": {"pass@1,create_test": True}}
    scored = score_in_child(scoring_job(coder, task, (0, len(ANSWERS)), backend="extra"), quiet)
    outcomes = {list(ANSWERS)[row.doc_id]: row.outcome for row in scored}
    assert outcomes == {name: worth for name, (_, worth) in ANSWERS.items()}
    assert {row.metric for row in scored} == {"pass@1,create_test"}
    assert not (owner / "taken").exists()
