"""Send pairs of answers to the judge, one request per pair and order, and yield each judgment as it arrives.

Callers store the judgments: the judge stage in its artifact, and the shadow evaluation in its ledger. The shadow
evaluation compares recorded answers. Both answers belong to the same conversation, so each pair is one turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple

from mergegate.tasks.judge.comparison import ORDERS, Judgment, Order, Winner
from mergegate.tasks.judge.prompts import Prompt
from mergegate.tasks.judge.rubric import INSTRUCTIONS, Choice, JudgedTurn, messages, parse_reply, response_format
from mergegate.tasks.judge.server import ChatServer
from mergegate.tasks.judge.settings import JudgeServer, JudgmentSettings


class JudgeQuestion(NamedTuple):
    """One question to the judge: a pair of answers in one order."""

    order: Order
    exchange: JudgedTurn

    @property
    def key(self) -> tuple[str, int, Order]:
        return self.exchange.prompt.id, self.exchange.turn, self.order


def both_orders(prompt: Prompt, turn: int, reference: Sequence[str], merge: Sequence[str]) -> tuple[JudgeQuestion, ...]:
    """Return the questions about one pair of answers, one for each order.

    ``reference`` and ``merge`` are the answers of each model up to and including this turn.
    """
    return tuple(
        JudgeQuestion(
            order, JudgedTurn(prompt, turn, *((reference, merge) if order == "reference first" else (merge, reference)))
        )
        for order in ORDERS
    )


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
    )


class RecordedAnswerPair(NamedTuple):
    """Two recorded answers to one question."""

    id: str
    question: str
    reference: str
    merge: str


def judge_recorded_pairs(
    pairs: Sequence[RecordedAnswerPair],
    judging: JudgmentSettings,
    server: JudgeServer,
    judged_orders: Collection[tuple[str, Order]] = (),
) -> Iterator[Judgment]:
    """Yield the judgment on each pair in each order as it arrives. Pairs of equal answers are skipped.

    ``judged_orders`` holds ``(id, order)`` of earlier judgments, which are not requested again.

    Raises:
        InvalidInput: If the server cannot be reached.
    """
    questions = [
        question
        for pair in pairs
        if pair.reference != pair.merge
        for question in both_orders(Prompt(pair.id, (pair.question,), (None,)), 0, (pair.reference,), (pair.merge,))
        if (pair.id, question.order) not in judged_orders
    ]
    return ask_judge(questions, judging, server, INSTRUCTIONS)
