"""Run the stage ``judge``: send every pair of answers to the judge in both orders, and record each judgment as a line.

A judgment costs money or minutes, so none is requested twice. Equal answers are a tie without a request. A stage
that was interrupted (for example because the server became unavailable) resumes with the remaining pairs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.files import JOURNAL, JournalLocation, open_journal
from mergegate.tasks.base.stage import Runtime, StageValue, advance, stage
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.models.checkpoints import Model
from mergegate.tasks.quality.judge.answers import (
    AnswerSummary,
    ConversationAnswers,
    JudgePrompts,
    Prompt,
    Prompts,
    References,
    answer,
    read_answers,
    read_prompts,
    write_lines,
)
from mergegate.tasks.quality.judge.comparison import ORDERS, JudgeVerdict, Judgment, answers_verdict, settle
from mergegate.tasks.quality.judge.questions import (
    DAMAGES,
    INSTRUCTIONS,
    JudgeQuestion,
    ask_judge,
    both_orders,
    control_count,
    control_questions,
)
from mergegate.tasks.quality.judge.settings import (
    ControlSettings,
    Generation,
    JudgeRule,
    JudgeServer,
    JudgeSettings,
    JudgmentSettings,
)

PAIRS, FILE = "pairs.jsonl", "judgements.jsonl"


class Judgments(StageValue):
    """All judgments in one run.

    The artifact contains ``pairs.jsonl`` (one line per prompt: its turns, references and both models' answers) and
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
    """Verdict on a merge's answers, and the judgments on which it is based."""

    verdict: JudgeVerdict
    judgments: Artifact[Judgments]


def judge_models(
    reference: Model, merge: Model, prompts: JudgePrompts, settings: JudgeSettings, runtime: Runtime
) -> JudgedAnswers:
    """Generate both models' answers, send them to the judge, and decide.

    Answers and judgments are cached by content, so a changed threshold needs no new requests.

    Raises:
        InvalidInput: If a model cannot be loaded, the server cannot be reached, or the prompts cannot be read.
    """
    generation = settings.part(Generation)
    reference_answers = answer(reference, prompts.prompts, generation, runtime)
    merge_answers = answer(merge, prompts.prompts, generation, runtime)
    judgments = judge(
        reference_answers,
        merge_answers,
        prompts.prompts,
        prompts.references,
        settings.part(JudgmentSettings),
        settings.part(JudgeServer),
        INSTRUCTIONS,
        settings.part(ControlSettings),
    )
    lines = (judgments.directory / FILE).read_text(encoding="utf-8").splitlines()
    verdict = answers_verdict(
        settings.model,
        reference_answers.value.model_copy(update={"model": reference.name}),  # stored under another name, perhaps
        merge_answers.value,
        [Judgment.model_validate_json(line) for line in lines],
        judgments.value.identical,
        settings.part(JudgeRule),
    )
    return JudgedAnswers(verdict, judgments)


@stage("judge", version=2, resumable=True)
def judge(
    out: Path,
    reference: Artifact[AnswerSummary],
    merge: Artifact[AnswerSummary],
    prompts: Prompts,
    references: References | None,
    judging: JudgmentSettings,
    server: JudgeServer,
    instructions: str,
    controls: ControlSettings,
) -> Judgments:
    """Judge every pair of answers in both orders, mixed with control pairs.

    ``instructions`` is the text of the rubric, which is part of the cache key.

    Raises:
        InvalidInput: If the server cannot be reached.
    """
    prompt_list = read_prompts(prompts, references)
    reference_answers, merge_answers = (read_answers(side.directory) for side in (reference, merge))
    pairs: list[dict[str, object]] = []
    identical: list[tuple[str, int]] = []  # pairs that need no judge
    questions: list[JudgeQuestion] = []
    for prompt in prompt_list:
        first, second = reference_answers[prompt.id].answers, merge_answers[prompt.id].answers
        pair = {"id": prompt.id, "category": prompt.category, "turns": prompt.turns, "references": prompt.references}
        pairs.append({**pair, "reference": first, "merge": second})
        for turn in range(len(prompt.turns)):
            if first[: turn + 1] == second[: turn + 1]:
                identical.append((prompt.id, turn))
            else:
                questions += both_orders(prompt, turn, first[: turn + 1], second[: turn + 1])
    if questions:
        count = control_count(len(questions) // len(ORDERS), controls.control_share)
        sides = {"reference": reference_answers, "merge": merge_answers}
        questions += _controls(prompt_list, sides, len(ORDERS) * count)
    # In an order that is unrelated to the answers, so that a judge with a memory cannot tell controls apart.
    questions.sort(key=lambda question: hashlib.sha256(repr(question.key).encode()).digest())
    write_lines(out / PAIRS, pairs)
    key = judge.key(reference, merge, prompts, references, judging, server, instructions, controls)
    with open_journal(JournalLocation(out / JOURNAL, key)) as journal:
        recorded = map(Judgment.model_validate, journal.records)
        # An unreadable reply is requested once more.
        judgments = {judgment.key: judgment for judgment in recorded if judgment.winner is not None}
        remaining = [question for question in questions if question.key not in judgments]
        for judgment in ask_judge(remaining, judging, server, instructions):
            judgments[judgment.key] = judgment
            journal.append(judgment.model_dump(mode="json"))
            advance(len(judgments), len(questions), "judgments")
    write_lines(out / FILE, (judgments[question.key].model_dump(mode="json") for question in questions))
    winners = Counter(pair.winner for pair in settle(judgments.values(), identical))
    return Judgments(
        judge=judging.model,
        prompts=len(prompt_list),
        identical=tuple(identical),
        wins=winners["merge"],
        ties=winners["tie"],
        losses=winners["reference"],
    )


def _controls(
    prompts: Sequence[Prompt], answers: Mapping[str, Mapping[str, ConversationAnswers]], limit: int
) -> list[JudgeQuestion]:
    """Return at most ``limit`` questions about control pairs, from complete answers of both models in a fixed order."""
    candidates = [
        (prompt, turn, author, damage)
        for prompt in prompts
        for turn in range(len(prompt.turns))
        for author in answers
        for damage in DAMAGES
        if not answers[author][prompt.id].cut_off[turn]
    ]
    candidates.sort(key=lambda item: hashlib.sha256(repr((item[0].id, *item[1:])).encode()).digest())
    questions: list[JudgeQuestion] = []
    for prompt, turn, author, damage in candidates:
        if len(questions) >= limit:
            break
        questions += control_questions(prompt, turn, answers[author][prompt.id].answers, damage, author)
    return questions
