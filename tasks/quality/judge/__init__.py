"""Judge a merge by its answers: two models answer the same prompts, and an LLM decides whose answers are better.

::

    prompts = pin_prompts(settings, root, hashes)
    judged = judge_models(reference, merge, prompts, settings, runtime())
    judged.verdict.outcome, judged.verdict.reason
    for judgment in judge_recorded_pairs(pairs, judging, server): ...      # answers that users received

The judge is off by default. For practice and limits of LLM judges see Zheng et al. 2023 (arXiv 2306.05685). The judge
sees every pair in both orders because of the position bias (Shi et al. 2024, arXiv 2406.07791).
"""

from mergegate.tasks.quality.judge.answers import JudgePrompts, pin_prompts, read_prompts
from mergegate.tasks.quality.judge.comparison import (
    ORDERS,
    SCORES,
    ControlResult,
    JudgeVerdict,
    Judgment,
    JudgmentKey,
    Order,
    controls_found,
    settle,
)
from mergegate.tasks.quality.judge.questions import (
    INSTRUCTIONS,
    RecordedAnswerPair,
    control_count,
    judge_recorded_pairs,
)
from mergegate.tasks.quality.judge.settings import (
    AnswerLimits,
    ControlSettings,
    JudgeRule,
    JudgeServer,
    JudgeSettings,
    JudgmentSettings,
)
from mergegate.tasks.quality.judge.stage import judge_models
