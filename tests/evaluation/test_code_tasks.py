"""Code tasks run only if they are allowed by name, and their scores match the published pass@k estimator."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from fractions import Fraction
from importlib import invalidate_caches
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from confined_here import require_confinement
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.checkpoints import Model, end_model_process
from mergegate.tasks.evaluation import EvalTask, Scoring, pin_task
from mergegate.tasks.evaluation.backends.registry import added_backends
from mergegate.tasks.evaluation.code_metric import CodeEval, pass_at
from mergegate.tasks.evaluation.code_permission import allow_code
from mergegate.tasks.evaluation.document_order import DocumentRange
from mergegate.tasks.evaluation.harness import ScoringJob
from mergegate.tasks.evaluation.process import inspect_in_child, score_in_child
from mergegate.tasks.evaluation.support import UnsupportedReason, refusal_of_leaf, require_supported, shipped_leaves
from mergegate.tasks.gate import EvaluateSettings, Guard, pin_tasks
from mergegate.tasks.sandbox import ProgramLimits

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
from mergegate.tasks.evaluation import Backend
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

BACKEND = Backend("coder", "writes what it is told", opened)
'''


def mirror(place: Path, home: Path) -> Path:
    """Write a directory for ``evaluate.data`` with small versions of HumanEval and MBPP."""
    place.mkdir()
    humaneval = [
        {
            "task_id": f"own/{name}",
            "prompt": f"HOME = {str(home)!r}\ndef {name}():\n",
            "entry_point": name,
            "canonical_solution": "    return 1",
            "test": "def check(function):\n    assert function() == 1\n",
        }
        for name in ANSWERS
    ]
    mbpp = [
        {"task_id": at, "text": f"Write {name}.", "code": "", "test_list": [f"assert {name}() == 1"] * 3}
        for at, name in enumerate(WHOLE)
    ]
    for name, rows in (("humaneval", humaneval), ("mbpp", mbpp)):
        (place / f"{name}_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def pinned(name: str, data: Path) -> EvalTask:
    return allow_code(pin_task(name, data, HashMemo(data.parent / "hashes.db"), data), name, [name])


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
        for leaf in shipped_leaves(name)
        if (refusal := refusal_of_leaf(leaf, code_allowed=True))
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


def test_a_local_task_runs_programs_confined_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(
        "task: t\nunsafe_code: true\ndataset_path: json\ndataset_kwargs: {data_files: {test: t.jsonl}}\n"
        "test_split: test\noutput_type: generate_until\nprocess_results: !function own.scored\n"
    )
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n')
    own = "def scored(doc, results): {}\n"
    (tmp_path / "own.py").write_text(own.format("exec(results[0])"))
    with pytest.raises(InvalidInput, match=r"exec in own.py"):
        allow_code(pin_task("t.yaml", tmp_path, HashMemo(tmp_path / "h.db")), "t.yaml", ["t.yaml"])
    (tmp_path / "far.yaml").write_text((tmp_path / "t.yaml").read_text().replace("own.scored", "pdb.run"))
    with pytest.raises(InvalidInput, match=r"pdb.run, in a module that is not next to"):
        allow_code(pin_task("far.yaml", tmp_path, HashMemo(tmp_path / "h.db")), "far.yaml", ["far.yaml"])
    bounded = "def check_correctness(program): return run(program)\ndef run(program): exec(program)\n"
    (tmp_path / "own.py").write_text(bounded + own.format("return {'passed': check_correctness(results[0])}"))
    assert allow_code(pin_task("t.yaml", tmp_path, HashMemo(tmp_path / "h2.db")), "t.yaml", ["t.yaml"]).code


@pytest.fixture
def coder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """Return a model that writes the code in ``ANSWERS``, in this process and in the evaluation process."""
    site = tmp_path / "site"
    facts = site / "mergegate_coder.dist-info"
    facts.mkdir(parents=True)
    answers = json.dumps({name: answer for name, (answer, _) in {**WHOLE, **ANSWERS}.items()})
    (site / "coder_backend.py").write_text(CODER.format(answers=answers))
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mergegate-coder\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[mergegate.backends]\ncoder = coder_backend:BACKEND\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    invalidate_caches()
    added_backends.cache_clear()
    end_model_process()
    yield Model(name="coder", digest="0" * 64, directory=tmp_path)
    end_model_process()
    monkeypatch.undo()
    sys.modules.pop("coder_backend", None)
    added_backends.cache_clear()


@pytest.mark.story
@pytest.mark.usefixtures("home")
def test_each_document_is_scored_by_what_its_program_does(tmp_path: Path, coder: Model) -> None:
    require_confinement()
    owner = Path.home()
    data = mirror(tmp_path / "data", owner)
    task = pinned("humaneval", data).model_copy(update={"code": QUICK})
    found = inspect_in_child(task)
    assert found.metrics == {"humaneval": {"pass@1,create_test": True}}
    part = DocumentRange(first=0, last=len(ANSWERS))
    scored = score_in_child(ScoringJob(coder, task, Scoring(backend="coder"), part, "cpu"), lambda done, total: None)
    outcomes = {list(ANSWERS)[row.doc_id]: row.outcome for row in scored}
    assert outcomes == {name: worth for name, (_, worth) in ANSWERS.items()}
    assert {row.metric for row in scored} == {"pass@1,create_test"}
    assert not (owner / "taken").exists()


@pytest.mark.proof
@pytest.mark.story
@pytest.mark.usefixtures("home")
def test_mbpp_runs_programs_in_the_same_sandbox(tmp_path: Path, coder: Model) -> None:
    require_confinement()
    data = mirror(tmp_path / "data", tmp_path)
    task = pinned("mbpp", data).model_copy(update={"code": QUICK})
    part = DocumentRange(first=0, last=2)
    scored = score_in_child(
        ScoringJob(coder, task, Scoring(backend="coder", num_fewshot=0), part, "cpu"), lambda done, total: None
    )
    assert {row.metric for row in scored} == {"pass_at_1,none"}
    assert [row.outcome for row in scored] == [worth for _, worth in WHOLE.values()]
