"""Send pairs of answers to the judge, one request per pair and order, and yield each judgment as it arrives.

Callers store the judgments in their own way: a stage in its artifact, the shadow in its ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple

from mergegate.tasks.judge.comparison import ORDERS, Judgment, Order, Winner
from mergegate.tasks.judge.prompts import Prompt
from mergegate.tasks.judge.rubric import Choice, JudgedTurn, messages, parse, response_format
from mergegate.tasks.judge.server import ChatServer
from mergegate.tasks.judge.settings import JudgeServer, JudgmentSettings


class JudgeQuestion(NamedTuple):
    """One question for the judge: a pair of answers in one order."""

    order: Order
    exchange: JudgedTurn

    @property
    def key(self) -> tuple[str, int, Order]:
        return self.exchange.prompt.id, self.exchange.turn, self.order


def both_orders(prompt: Prompt, turn: int, reference: Sequence[str], merge: Sequence[str]) -> tuple[JudgeQuestion, ...]:
    """Return the questions about one pair of answers, one for each order.

    Args:
        reference, merge: Answers of each model up to and including this turn.
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

    Without questions, no server needs to be running. Closing the iterator stops all further requests.

    At most ``server.concurrency`` questions are in flight beyond the judgments already yielded, even if the consumer is
    slow. If the process is killed, only these are lost and repeated.

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
                pool.submit(_ask, connection, question, judging, instructions) for question in islice(pending, count)
            }

        pending = iter(questions)
        waiting = submit(server.concurrency)
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()
                waiting |= submit(1)


def _ask(connection: ChatServer, question: JudgeQuestion, judging: JudgmentSettings, instructions: str) -> Judgment:
    reply = connection.ask(
        judging.model,
        messages(question.exchange, judging.dimensions, instructions),
        response_format(judging.dimensions),
        judging.max_tokens,
    )
    vote = parse(reply.text, judging.dimensions)
    return Judgment(
        prompt=question.exchange.prompt.id,
        turn=question.exchange.turn,
        order=question.order,
        winner=_winner(vote.verdict, question.order) if vote else None,
        dimensions={name: _winner(choice, question.order) for name, choice in vote.dimensions.items()} if vote else {},
        reasoning=vote.reasoning if vote else "",
        reply=reply.text,
        judge=reply.model,
    )


def _winner(choice: Choice, order: Order) -> Winner:
    """Return which model wrote the preferred answer."""
    if choice == "tie":
        return "tie"
    return "reference" if (choice == "A") == (order == "reference first") else "merge"
