"""The judge: two models answer the same prompts, and a third one says whose answers are better.

::

    prompts = pin_prompts(settings, root, hashes)
    judged = judge_models(reference, merge, prompts, settings, runtime())
    judged.verdict.outcome, judged.verdict.reason

Optional, and off by default. Practice and limits of judging by a model: Zheng et al. 2023 (arXiv 2306.05685) and Shi et
al. 2024 (arXiv 2406.07791) on the bias for a position, which is why every pair is shown in both orders.
"""

from tasks.judge.comparison import JudgeVerdict
from tasks.judge.prompts import JudgePrompts, pin_prompts
from tasks.judge.settings import JudgeServer, JudgeSettings, Judging
from tasks.judge.stage import judge_models

__all__ = [
    "JudgePrompts",
    "JudgeServer",
    "JudgeSettings",
    "JudgeVerdict",
    "Judging",
    "judge_models",
    "pin_prompts",
]
