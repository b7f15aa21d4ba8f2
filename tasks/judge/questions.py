"""Send pairs of answers to the judge, one request per pair and order, and yield each judgment as it arrives.

Callers store the judgments: the judge stage in its artifact, and the shadow evaluation in its ledger. The shadow
evaluation compares recorded answers. Both answers belong to the same conversation, so each pair is one turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple

from mergegate.tasks.judge.comparison import ORDERS, Judgment, JudgmentKey, Order, Winner
from mergegate.tasks.judge.controls import DAMAGES, Damage, damaged_copy
from mergegate.tasks.judge.prompts import Prompt
from mergegate.tasks.judge.rubric import INSTRUCTIONS, Choice, JudgedTurn, messages, parse_reply, response_format
from mergegate.tasks.judge.server import ChatServer
from mergegate.tasks.judge.settings import JudgeServer, JudgmentSettings


class JudgeQuestion(NamedTuple):
    """One question to the judge: a pair of answers in one order."""

    order: Order
    exchange: JudgedTurn
    control: str = ""  # name of the control; empty for a pair of both models' answers

    @property
    def key(self) -> JudgmentKey:
        return JudgmentKey(self.exchange.prompt.id, self.exchange.turn, self.order, self.control)


def both_orders(
    prompt: Prompt, turn: int, reference: Sequence[str], merge: Sequence[str], control: str = ""
) -> tuple[JudgeQuestion, ...]:
    """Return the questions about one pair of answers, one for each order.

    ``reference`` and ``merge`` are the answers of each model up to and including this turn. In a ``control``, the
    reference is intact and the merge is damaged.
    """
    return tuple(
        JudgeQuestion(
            order,
            JudgedTurn(prompt, turn, *((reference, merge) if order == "reference first" else (merge, reference))),
            control,
        )
        for order in ORDERS
    )


def control_questions(
    prompt: Prompt, turn: int, answers: Sequence[str], damage: Damage, author: str
) -> tuple[JudgeQuestion, ...]:
    """Return the questions that compare an answer with a damaged copy of it, or none if it cannot be damaged.

    ``answers`` are those of one model up to and including this turn. ``author`` names this model.
    """
    damaged = damaged_copy(answers[turn], damage)
    if damaged is None:
        return ()
    return both_orders(prompt, turn, answers, (*answers[:turn], damaged), f"{author}, {damage}")


def ask_judge(
    questions: Sequence[JudgeQuestion], judging: JudgmentSettings, server: JudgeServer, instructions: str
) -> Iterator[Judgment]:
    """Yield the judgment on each question, in the order of completion.

    At most ``server.concurrency`` requests are running or not yet yielded, so an interruption loses only these. Closing
    the iterator stops all further requests. Without questions, no server is needed.

    Raises:
        InvalidInput: If the server cannot be reached.
    """
    if not questions:
        return
    with ExitStack() as stack:
        connection = stack.enter_context(ChatServer(server))
        pool = ThreadPoolExecutor(server.concurrency, thread_name_prefix="judge")
        stack.callback(pool.shutdown, cancel_futures=True)

        def submit(count: int) -> set[Future[Judgment]]:
            return {
                pool.submit(_judge_question, connection, question, judging, instructions)
                for question in islice(pending, count)
            }

        pending = iter(questions)
        waiting = submit(server.concurrency)
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()
                waiting |= submit(1)


def _judge_question(
    connection: ChatServer, question: JudgeQuestion, judging: JudgmentSettings, instructions: str
) -> Judgment:
    reply = connection.ask(
        judging.model,
        messages(question.exchange, judging.dimensions, instructions),
        response_format(judging.dimensions),
        judging.max_tokens,
    )
    vote = parse_reply(reply.text, judging.dimensions)

    def winner_of(choice: Choice) -> Winner:  # the model that wrote the preferred answer
        if choice == "tie":
            return "tie"
        return "reference" if (choice == "A") == (question.order == "reference first") else "merge"

    return Judgment(
        prompt=question.exchange.prompt.id,
        turn=question.exchange.turn,
        order=question.order,
        winner=winner_of(vote.verdict) if vote else None,
        dimensions={name: winner_of(choice) for name, choice in vote.dimensions.items()} if vote else {},
        reasoning=vote.reasoning if vote else "",
        reply=reply.text,
        judge=reply.model,
        control=question.control,
    )


class RecordedAnswerPair(NamedTuple):
    """Two recorded answers to one question."""

    id: str
    question: str
    reference: str
    merge: str
    cut_off: tuple[str, ...] = ()  # 'reference' and 'merge', if the token limit cut off their answer

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.id, (self.question,), (None,))

    def questions(self) -> tuple[JudgeQuestion, ...]:
        """Return the question in each order, or none if both answers are equal."""
        if self.reference == self.merge:
            return ()
        return both_orders(self.prompt, 0, (self.reference,), (self.merge,))

    def controls(self) -> tuple[JudgeQuestion, ...]:
        """Return a control: a complete answer and a damaged copy of it, or none if no answer can be damaged.

        A hash of the ID decides which answer is tried first, and with which damage.
        """
        texts = {"reference": self.reference, "merge": self.merge}
        choices = [(author, damage) for author in texts for damage in DAMAGES if author not in self.cut_off]
        choices.sort(key=lambda choice: hashlib.sha256(repr((self.id, *choice)).encode()).digest())
        found = (control_questions(self.prompt, 0, (texts[author],), damage, author) for author, damage in choices)
        return next(filter(None, found), ())


def judge_recorded_pairs(
    pairs: Sequence[RecordedAnswerPair],
    judging: JudgmentSettings,
    server: JudgeServer,
    judged_keys: Collection[JudgmentKey] = (),
    controls: Collection[str] = (),
) -> Iterator[Judgment]:
    """Yield the judgment on each pair in each order as it arrives. Pairs of equal answers are skipped.

    ``judged_keys`` holds the keys of earlier judgments, which are not requested again. ``controls`` holds the IDs of
    the pairs whose control is judged, too.

    Raises:
        InvalidInput: If the server cannot be reached.
    """
    questions = [
        question
        for pair in pairs
        for question in (*pair.questions(), *(pair.controls() if pair.id in controls else ()))
        if question.key not in judged_keys
    ]
    return ask_judge(questions, judging, server, INSTRUCTIONS)
