"""Run inspect_ai on recorded answers, in the environment of the official validators, and convert its logs.

Run as a program by that environment, this file reads jobs from standard input: ``[task, ...]`` with the fields of
``InspectTask``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_inspect(tasks: Sequence[Mapping[str, Any]], python: Path) -> list[dict[str, Any]]:
    """Evaluate tasks with inspect_ai, and return for each log its path and the scores that inspect_ai reads from it.

    A task has ``name``, ``model``, ``log_dir``, ``format``, ``scorer`` and ``samples``. A sample has the fields of
    inspect_ai's own, and the ``answers`` of the model, one for each epoch.
    """
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [python, __file__], input=json.dumps(tasks), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    logs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return logs


def _main() -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.log import read_eval_log
    from inspect_ai.model import ModelAPI, ModelOutput, modelapi
    from inspect_ai.scorer import Score, accuracy, choice, match, mean, scorer, stderr
    from inspect_ai.solver import generate, multiple_choice, system_message

    answers: dict[str, dict[str, list[str]]] = {}  # by model and question

    @modelapi(name="replay")
    class Replay(ModelAPI):  # type: ignore[misc]
        """Give the recorded answers. One that ends in an ellipsis was cut off."""

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            prompt, known = input[-1].text, answers[self.model_name]
            # The prompt of a choice contains the question.
            answer = known[next(text for text in (prompt, *known) if text in known and text in prompt)].pop(0)
            return ModelOutput.from_content(
                "replay", answer, stop_reason="max_tokens" if answer[-1:] == "…" else "stop"
            )

    @scorer(metrics=[mean(), stderr()])
    def graded() -> Any:
        async def score(state: Any, target: Any) -> Any:
            return Score(value=json.loads(state.output.completion.rstrip("…")))

        return score

    @scorer(metrics={"*": [mean(), accuracy()]})
    def several() -> Any:
        async def score(state: Any, target: Any) -> Any:
            value = json.loads(state.output.completion.rstrip("…"))
            return Score(value={"same": value, "right": value == 1})

        return score

    logs = []
    for task in json.load(sys.stdin):
        samples = []
        for sample in task["samples"]:
            answers.setdefault(task["model"], {})[sample["input"]] = sample.pop("answers")
            samples.append(Sample(**sample))
        scorers = {"match": [match(location="exact")], "choice": [choice()], "graded": [graded(), several()]}[
            task["scorer"]
        ]
        solver = [multiple_choice()] if task["scorer"] == "choice" else [system_message("Be brief."), generate()]
        (log,) = eval(
            Task(name=task["name"], dataset=samples, solver=solver, scorer=scorers, version=task.get("version", 0)),
            model=f"replay/{task['model']}",
            epochs=task.get("epochs"),
            log_dir=task["log_dir"],
            log_format=task["format"],
            log_realtime=False,
            log_model_api=False,
            display="none",
            temperature=0.0,
        )
        assert log.status == "success", log.error
        read = read_eval_log(log.location)
        reductions = {
            f"{each.scorer}": {str(score.sample_id): score.value for score in each.samples} for each in read.reductions
        }
        logs.append({"path": log.location, "reductions": reductions})
    print(json.dumps(logs))


if __name__ == "__main__":
    _main()
