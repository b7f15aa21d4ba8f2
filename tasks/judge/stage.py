"""Run the stage ``judge``: show every pair of answers to the judge in both orders, and record each judgment as a line.

A judgment costs money or minutes, so none is requested twice. Equal answers are a tie without a request, and a stage
that was interrupted (for example because the server went away) resumes with the remaining pairs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from mergegate.tasks.checkpoints import Model
from mergegate.tasks.judge.answers import AnswerSummary, ConversationAnswers, answer, read_answers
from mergegate.tasks.judge.comparison import AnswerStatistics, JudgeVerdict, Judgment, Order, answers_verdict, settle
from mergegate.tasks.judge.prompts import JudgePrompts, Prompt, Prompts, References, read_prompts
from mergegate.tasks.judge.questions import JudgeQuestion, ask_judge, both_orders
from mergegate.tasks.judge.rubric import INSTRUCTIONS
from mergegate.tasks.judge.settings import JudgeServer, JudgeSettings, JudgmentSettings
from mergegate.tasks.stage import Runtime, StageValue, advance, stage
from mergegate.tasks.store import Artifact

PAIRS, FILE, _UNFINISHED = "pairs.jsonl", "judgements.jsonl", "judgements.unfinished.jsonl"


class Judgments(StageValue):
    """All judgments of one run.

    The artifact holds ``pairs.jsonl`` (one line per prompt: its turns, references and both models' answers) and
    ``judgements.jsonl`` (one ``Judgment`` per line).
    """

    judge: str
    prompts: int
    identical: tuple[tuple[str, int], ...]  # (prompt, turn) of equal answers, which were not judged.
    wins: int  # Pairs that the merge wins in both orders.
    ties: int
    losses: int

    def summary(self) -> str:
        return f"{self.wins} won, {self.ties} tied, {self.losses} lost of {self.prompts} prompts"


class JudgedAnswers(NamedTuple):
    """Verdict with its evidence."""

    verdict: JudgeVerdict
    judgements: Artifact[Judgments]


def judge_models(
    reference: Model, merge: Model, prompts: JudgePrompts, settings: JudgeSettings, runtime: Runtime
) -> JudgedAnswers:
    """Generate both models' answers, have them judged, and decide.

    Answers and judgments are cached by content, so a changed threshold needs no new requests.

    Raises:
        InvalidInput: If a model cannot be loaded, the server cannot be reached, or the prompts cannot be read.
    """
    reference_answers = answer(reference, prompts.prompts, settings.generation, runtime)
    merge_answers = answer(merge, prompts.prompts, settings.generation, runtime)
    judging, server = settings.judging, settings.server
    judgements = judge(
        reference_answers, merge_answers, prompts.prompts, prompts.references, judging, server, INSTRUCTIONS
    )
    verdict = answers_verdict(
        settings.model,
        AnswerStatistics(reference.name, reference_answers.value.characters, reference_answers.value.cut_off),
        AnswerStatistics(merge.name, merge_answers.value.characters, merge_answers.value.cut_off),
        read_judgements(judgements.directory),
        judgements.value.identical,
        settings.rule,
    )
    return JudgedAnswers(verdict, judgements)


@stage("judge", version=1, resumable=True)
def judge(
    out: Path,
    reference: Artifact[AnswerSummary],
    merge: Artifact[AnswerSummary],
    prompts: Prompts,
    references: References | None,
    judging: JudgmentSettings,
    server: JudgeServer,
    instructions: str,
) -> Judgments:
    """Judge every pair of answers in both orders.

    Args:
        instructions: Text of the rubric, which is part of the key because it affects judgments.

    Raises:
        InvalidInput: If the server cannot be reached.
    """
    prompt_list = read_prompts(prompts, references)
    reference_answers, merge_answers = (read_answers(side.directory) for side in (reference, merge))
    _write(
        out / PAIRS,
        (_pair_line(prompt, reference_answers[prompt.id], merge_answers[prompt.id]) for prompt in prompt_list),
    )
    identical, questions = _questions(prompt_list, reference_answers, merge_answers)
    judgments = _ask_all(out / _UNFINISHED, questions, judging, server, instructions)
    _write(out / FILE, (judgments[question.key].model_dump(mode="json") for question in questions))
    (out / _UNFINISHED).unlink(missing_ok=True)
    pairs = settle(judgments.values(), identical)
    return Judgments(
        judge=judging.model,
        prompts=len(prompt_list),
        identical=tuple(identical),
        wins=sum(pair.winner == "merge" for pair in pairs),
        ties=sum(pair.winner == "tie" for pair in pairs),
        losses=sum(pair.winner == "reference" for pair in pairs),
    )


def read_judgements(directory: Path) -> tuple[Judgment, ...]:
    """Return the judgments of an artifact of this stage."""
    lines = (directory / FILE).read_text(encoding="utf-8").splitlines()
    return tuple(Judgment.model_validate_json(line) for line in lines)


def _questions(
    prompts: Sequence[Prompt],
    reference_answers: Mapping[str, ConversationAnswers],
    merge_answers: Mapping[str, ConversationAnswers],
) -> tuple[list[tuple[str, int]], list[JudgeQuestion]]:
    """Return the pairs that need no judge, and the questions about the other pairs."""
    identical: list[tuple[str, int]] = []
    questions: list[JudgeQuestion] = []
    for prompt in prompts:
        left, right = reference_answers[prompt.id].answers, merge_answers[prompt.id].answers
        for turn in range(len(prompt.turns)):
            if left[: turn + 1] == right[: turn + 1]:
                identical.append((prompt.id, turn))
                continue
            questions += both_orders(prompt, turn, left[: turn + 1], right[: turn + 1])
    return identical, questions


def _ask_all(
    unfinished: Path,
    questions: Sequence[JudgeQuestion],
    judging: JudgmentSettings,
    server: JudgeServer,
    instructions: str,
) -> dict[tuple[str, int, Order], Judgment]:
    """Return all judgments, reusing the ones recorded by an earlier attempt."""
    judgments = {(j.prompt, j.turn, j.order): j for j in _read_earlier(unfinished)}
    _write(unfinished, (j.model_dump(mode="json") for j in judgments.values()))  # Without a truncated last line.
    remaining = [question for question in questions if question.key not in judgments]
    with unfinished.open("a", encoding="utf-8") as record:
        for judgement in ask_judge(remaining, judging, server, instructions):
            judgments[judgement.prompt, judgement.turn, judgement.order] = judgement
            record.write(json.dumps(judgement.model_dump(mode="json"), ensure_ascii=False) + "\n")
            record.flush()
            advance(len(judgments), len(questions), "judgements")
    return judgments


def _read_earlier(unfinished: Path) -> Iterator[Judgment]:
    if not unfinished.is_file():
        return
    for line in unfinished.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            judgement = Judgment.model_validate_json(line)
        except ValidationError:
            continue  # The line that was being written when the run was killed.
        if judgement.winner is not None:  # An unreadable reply is requested once more.
            yield judgement


def _pair_line(prompt: Prompt, reference: ConversationAnswers, merge: ConversationAnswers) -> dict[str, object]:
    return {
        "id": prompt.id,
        "category": prompt.category,
        "turns": prompt.turns,
        "references": prompt.references,
        "reference": reference.answers,
        "merge": merge.answers,
    }


def _write(path: Path, rows: Iterator[Mapping[str, object]] | Iterator[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
