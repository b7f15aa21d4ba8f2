"""What else a merge is asked for that passed the gate: a judge's word on its answers, and a real server's on itself.

Each takes the merge and returns a verdict, or None where the profile does not ask for it. A judgement of yours is one
more function of this kind in the list of ``flows.release``.
"""

from __future__ import annotations

from mergegate.flows.attempt.attempt import JudgedMerge
from mergegate.tasks.judge import judge_models
from mergegate.tasks.serve import serve_models
from mergegate.tasks.stage import Verdict, runtime


def judge_answers(merge: JudgedMerge) -> Verdict | None:
    """A judge compares the answers of the merge with those of the parent that the profile names."""
    asked = merge.evidence.answers
    if asked is None:
        return None
    reference = next(parent for parent in merge.parents if parent.name == asked.settings.guarded_by)
    return judge_models(reference, merge.model, asked.prompts, asked.settings, runtime()).verdict.as_verdict()


def serve_merge(merge: JudgedMerge) -> Verdict | None:
    """The merge behind a real server, asked what a server can get wrong."""
    served = serve_models(merge.profile.serve, merge.profile.root, merge.model, merge.parents, merge.adapted)
    return served.as_verdict() if served else None
