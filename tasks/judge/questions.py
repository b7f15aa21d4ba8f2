"""Asking the judge: one question is a pair of answers in one order, and what is said of it is told as it comes.

Who asks keeps what was said, in its own way: a stage in its artifact, the shadow in its ledger.
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
    """One thing to ask: a pair of answers in one order."""

    order: Order
    exchange: JudgedTurn

    @property
    def key(self) -> tuple[str, int, Order]:
        return self.exchange.prompt.id, self.exchange.turn, self.order


def both_orders(prompt: Prompt, turn: int, reference: Sequence[str], merge: Sequence[str]) -> tuple[JudgeQuestion, ...]:
    """What to ask about one pair of answers: each order once.

    Args:
        reference, merge: Answers of each up to and with this turn.
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
    """What the judge says to each, in the order in which it answers. Where nobody is asked, the server need not be
    there; who stops listening stops the asking.

    No more is ever asked beyond what has been heard than ``server.concurrency``, however slowly somebody listens: that
    is what is lost, and asked once more, when this process is killed.

    Raises:
        InvalidInput: when the server cannot be asked.
    """
    if not questions:
        return
    with ExitStack() as stack:
        connection = stack.enter_context(ChatServer(server))
        pool = ThreadPoolExecutor(server.concurrency, thread_name_prefix="judge")
        stack.callback(pool.shutdown, cancel_futures=True)

        def begin(count: int) -> set[Future[Judgment]]:
            return {pool.submit(_ask, connection, question, judging, instructions) for question in islice(left, count)}

        left = iter(questions)
        waiting = begin(server.concurrency)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for one in done:
                yield one.result()
                waiting |= begin(1)


def _ask(connection: ChatServer, question: JudgeQuestion, judging: JudgmentSettings, instructions: str) -> Judgment:
    reply = connection.ask(
        judging.model,
        messages(question.exchange, judging.dimensions, instructions),
        response_format(judging.dimensions),
        judging.max_tokens,
    )
    opinion = parse(reply.text, judging.dimensions)
    return Judgment(
        prompt=question.exchange.prompt.id,
        turn=question.exchange.turn,
        order=question.order,
        winner=_who(opinion.verdict, question.order) if opinion else None,
        dimensions={name: _who(choice, question.order) for name, choice in opinion.dimensions.items()}
        if opinion
        else {},
        reasoning=opinion.reasoning if opinion else "",
        reply=reply.text,
        judge=reply.model,
    )


def _who(choice: Choice, order: Order) -> Winner:
    """Whose answer A or B was."""
    if choice == "tie":
        return "tie"
    return "reference" if (choice == "A") == (order == "reference first") else "merge"
