"""Answer lm-eval's requests about a model, with one file per backend and a registry that finds backends by name.

All backends tokenize a prompt in the same way. A tokenizer that adds a begin-of-text token adds one, unless the prompt
(from a chat template) already begins with it. Log-probabilities are sums of float32 log-softmax.
"""

from mergegate.tasks.evaluation.backends.contract import CUT_OFF, AnswerEnd, Backend
from mergegate.tasks.evaluation.backends.registry import find_backend

__all__ = ["CUT_OFF", "AnswerEnd", "Backend", "find_backend"]
