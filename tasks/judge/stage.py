"""The stage ``judge``: every pair of answers shown to the judge in both orders, and what it said kept line by line.

A judgement costs money or minutes, so none is asked for twice: equal answers are a tie without asking, and a stage that
broke off (a server that went away) goes on with the pairs that are left.
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
    """All that the judge said. The artifact holds ``pairs.jsonl`` (a line a prompt: its turns, references and both
    models' answers) and ``judgements.jsonl`` (a ``Judgement`` a line)."""

    judge: str
    prompts: int
    identical: tuple[tuple[str, int], ...]  # (prompt, turn) of equal answers, which nobody was asked about
    wins: int  # pairs that the merge wins in both orders
    ties: int
    losses: int

    def summary(self) -> str:
        return f"{self.wins} won, {self.ties} tied, {self.losses} lost of {self.prompts} prompts"


class JudgedAnswers(NamedTuple):
    """A verdict with the evidence that led to it."""

    verdict: JudgeVerdict
    judgements: Artifact[Judgments]


def judge_models(
    reference: Model, merge: Model, prompts: JudgePrompts, settings: JudgeSettings, runtime: Runtime
) -> JudgedAnswers:
    """Have both models answer, have the answers judged, and decide. Answers and judgements are cached by content; a
    changed threshold asks nobody anything.

    Raises:
        InvalidInput: when a model cannot be loaded, the server cannot be asked, or the prompts cannot be read.
    """
    ours = answer(reference, prompts.prompts, settings.generation, runtime)
    theirs = answer(merge, prompts.prompts, settings.generation, runtime)
    judging, server = settings.judging, settings.server
    judgements = judge(ours, theirs, prompts.prompts, prompts.references, judging, server, INSTRUCTIONS)
    verdict = answers_verdict(
        settings.model,
        AnswerStatistics(reference.name, ours.value.characters, ours.value.cut_off),
        AnswerStatistics(merge.name, theirs.value.characters, theirs.value.cut_off),
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
    """Ask the judge about every pair of answers in both orders.

    Args:
        instructions: The text of the rubric, which is part of the key because it decides judgements.

    Raises:
        InvalidInput: when the server cannot be asked.
    """
    asked = read_prompts(prompts, references)
    ours, theirs = (read_answers(side.directory) for side in (reference, merge))
    _write(out / PAIRS, (_pair_line(prompt, ours[prompt.id], theirs[prompt.id]) for prompt in asked))
    identical, questions = _questions(asked, ours, theirs)
    said = _ask_all(out / _UNFINISHED, questions, judging, server, instructions)
    _write(out / FILE, (said[question.key].model_dump(mode="json") for question in questions))
    (out / _UNFINISHED).unlink(missing_ok=True)
    pairs = settle(said.values(), identical)
    return Judgments(
        judge=judging.model,
        prompts=len(asked),
        identical=tuple(identical),
        wins=sum(pair.winner == "merge" for pair in pairs),
        ties=sum(pair.winner == "tie" for pair in pairs),
        losses=sum(pair.winner == "reference" for pair in pairs),
    )


def read_judgements(directory: Path) -> tuple[Judgment, ...]:
    """The judgements of an artifact of this stage."""
    lines = (directory / FILE).read_text(encoding="utf-8").splitlines()
    return tuple(Judgment.model_validate_json(line) for line in lines)


def _questions(
    asked: Sequence[Prompt], ours: Mapping[str, ConversationAnswers], theirs: Mapping[str, ConversationAnswers]
) -> tuple[list[tuple[str, int]], list[JudgeQuestion]]:
    """The pairs that need no judge, and what to ask about the others."""
    identical: list[tuple[str, int]] = []
    questions: list[JudgeQuestion] = []
    for prompt in asked:
        a, b = ours[prompt.id].answers, theirs[prompt.id].answers
        for turn in range(len(prompt.turns)):
            if a[: turn + 1] == b[: turn + 1]:
                identical.append((prompt.id, turn))
                continue
            questions += both_orders(prompt, turn, a[: turn + 1], b[: turn + 1])
    return identical, questions


def _ask_all(
    unfinished: Path,
    questions: Sequence[JudgeQuestion],
    judging: JudgmentSettings,
    server: JudgeServer,
    instructions: str,
) -> dict[tuple[str, int, Order], Judgment]:
    """Every judgement; those that an earlier attempt wrote down are taken from there."""
    said = {(j.prompt, j.turn, j.order): j for j in _earlier(unfinished)}
    _write(unfinished, (j.model_dump(mode="json") for j in said.values()))  # without a line that was cut off
    left = [question for question in questions if question.key not in said]
    with unfinished.open("a", encoding="utf-8") as record:
        for judgement in ask_judge(left, judging, server, instructions):
            said[judgement.prompt, judgement.turn, judgement.order] = judgement
            record.write(json.dumps(judgement.model_dump(mode="json"), ensure_ascii=False) + "\n")
            record.flush()
            advance(len(said), len(questions), "judgements")
    return said


def _earlier(unfinished: Path) -> Iterator[Judgment]:
    if not unfinished.is_file():
        return
    for line in unfinished.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            judgement = Judgment.model_validate_json(line)
        except ValidationError:
            continue  # the line that was being written when the run was killed
        if judgement.winner is not None:  # a reply that could not be read is asked for once more
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
