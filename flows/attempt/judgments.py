"""Judge a merge that passed the gate: let a judge compare its answers, and test the model on a real server.

Each judgment takes the merge and returns a verdict, or None if the profile does not configure it. To add a judgment,
write such a function and add it to ``JUDGMENTS`` in ``flows.release``.
"""

from __future__ import annotations

from mergegate.flows.attempt.attempt import JudgedMerge
from mergegate.tasks.judge import judge_models
from mergegate.tasks.serve import serve_models
from mergegate.tasks.stage import Verdict, runtime


def judge_answers(merge: JudgedMerge) -> Verdict | None:
    """Let a judge compare the merge's answers with those of the parent that the profile selects."""
    comparison = merge.evidence.answers
    if comparison is None:
        return None
    reference = next(parent for parent in merge.parents if parent.name == comparison.settings.guarded_by)
    return judge_models(reference, merge.model, comparison.prompts, comparison.settings, runtime()).verdict.as_verdict()


def serve_merge(merge: JudgedMerge) -> Verdict | None:
    """Run the smoke test of the merge on a real server, and measure its parents there if the profile requests it."""
    served = serve_models(merge.profile.serve, merge.profile.root, merge.model, merge.parents, merge.adapted)
    return served.as_verdict() if served else None
