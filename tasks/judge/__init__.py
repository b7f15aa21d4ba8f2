"""The judge: two models answer the same prompts, and a third one says whose answers are better.

::

    prompts = pin_prompts(settings, root, hashes)
    judged = judge_models(reference, merge, prompts, settings, runtime())
    judged.verdict.outcome, judged.verdict.reason
    for judgement in judge_given(pairs, judging, server): ...      # answers that users were given

Optional, and off by default. Practice and limits of judging by a model: Zheng et al. 2023 (arXiv 2306.05685) and Shi et
al. 2024 (arXiv 2406.07791) on the bias for a position, which is why every pair is shown in both orders.
"""

from mergegate.tasks.judge.comparison import ORDERS, JudgeVerdict, Judgment, Order
from mergegate.tasks.judge.prompts import JudgePrompts, pin_prompts
from mergegate.tasks.judge.recorded_answers import (
    PairScore,
    RecordedAnswerPair,
    judge_digest,
    judge_recorded_pairs,
    score_pair,
)
from mergegate.tasks.judge.settings import JudgeRule, JudgeServer, JudgeSettings, JudgmentSettings
from mergegate.tasks.judge.stage import judge_models

__all__ = [
    "ORDERS",
    "JudgePrompts",
    "JudgeRule",
    "JudgeServer",
    "JudgeSettings",
    "JudgeVerdict",
    "Judgment",
    "JudgmentSettings",
    "Order",
    "PairScore",
    "RecordedAnswerPair",
    "judge_digest",
    "judge_models",
    "judge_recorded_pairs",
    "pin_prompts",
    "score_pair",
]
