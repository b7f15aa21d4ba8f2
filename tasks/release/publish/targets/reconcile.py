"""Bring a target to the state of a release: read the state, take the next step, and repeat until nothing is left to do.

The loop keeps no memory of what it has sent, so a lost answer, a kill or a second publisher just leads to another
state, and running again is always correct. What the next step is, each target decides as a pure function of the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from mergegate.merge_core.errors import Refused

Observed = TypeVar("Observed")
NextStep = TypeVar("NextStep")


@dataclass(frozen=True)
class PublicationBlocked:
    """Reason why continuing would break a guarantee, so that an operator must decide."""

    found: str
    expected: str
    remedy: str


def version_taken(version: str, difference: str) -> PublicationBlocked:
    """Return the reason for a ``version`` that is published with other content."""
    return PublicationBlocked(
        f"the version {version} is already published with other content ({difference})",
        "the same content, because a version never changes",
        "publish under a new version",
    )


def overtaken(current: str, expected: str) -> PublicationBlocked:
    """Return the reason for a target whose current release has changed since the merge was compared with it."""
    return PublicationBlocked(
        current, expected, "run again; mergegate then compares the merge with the current release"
    )


class NotStored(RuntimeError):
    """The target accepted a step, but its state did not change."""


class Publication(ABC, Generic[Observed, NextStep]):
    """One publication: the requests that read and change a target, and the decision between them."""

    rounds: ClassVar[int] = 20  # steps after which another writer must be undoing them
    mismatch: ClassVar[str] = "the stored files differ from the sent ones"  # message for a step without an effect
    writer_hint: ClassVar[str] = ""  # what the remedy says about other writers

    @property
    @abstractmethod
    def address(self) -> str:
        """Address of the target, for messages."""

    @abstractmethod
    def observe(self) -> Observed:
        """Read the present state."""

    @abstractmethod
    def decide(self, observed_state: Observed, expected_head: str | None) -> NextStep | PublicationBlocked | None:
        """Return the next step, or None if nothing is left to do.

        ``expected_head`` is the head of the target that the release was compared with.
        """

    @abstractmethod
    def execute(self, step: NextStep, observed_state: Observed) -> bool:
        """Execute one step, which may be late or repeated. Return whether the target has confirmed its effect."""

    @abstractmethod
    def head(self, observed_state: Observed) -> str | None:
        """Return the head of the target (see ``CurrentRelease``)."""

    def kind(self, step: NextStep) -> str:
        """Return the name of a step. It is the same for two steps if the first ought to make the second unnecessary."""
        return str(step)

    def recover(self, error: Exception, failures: int) -> None:
        """Wait after the error that ended a step, or raise it. ``failures`` counts the errors in a row."""
        if not isinstance(error, NotStored):
            raise error
        raise Refused(
            self.address,
            found=f"{self.mismatch} ({error})",
            expected="the bytes that were evaluated and gated",
            remedy="run again; mergegate rebuilds an artifact that was altered on disk. "
            "The current release was not changed",
        ) from None

    def run(self, expected_head: str | None = None) -> tuple[Observed, list[NextStep]]:
        """Execute steps until nothing is left to do. Return the last state, and the steps that were tried.

        ``expected_head`` is None if any head is accepted that the target has at the start.

        Raises:
            Refused: Continuing would break a guarantee, a step has no effect, or another writer undoes every step.
        """
        steps: list[NextStep] = []
        previous = ""
        is_confirmed, failures = False, 0
        for _ in range(self.rounds):
            try:
                observed = self.observe()
                expected_head = self.head(observed) if expected_head is None else expected_head
                step = self.decide(observed, expected_head)
                if step is None:
                    return observed, steps
                if isinstance(step, PublicationBlocked):
                    raise Refused(self.address, found=step.found, expected=step.expected, remedy=step.remedy)
                kind = self.kind(step)
                if kind != previous:
                    previous, failures = kind, 0
                elif is_confirmed:
                    raise NotStored(kind)
                is_confirmed = False
                steps.append(step)
                is_confirmed = self.execute(step, observed)
            except Exception as error:
                is_confirmed, failures = False, failures + 1
                self.recover(error, failures)
        raise Refused(
            self.address,
            found="another writer undoes every step as soon as mergegate takes it",
            expected="one publisher at a time",
            remedy=f"find out who else writes to this location, then run again{self.writer_hint}",
        )
