"""Answer lm-eval's requests to a model, with one module per backend and a registry that finds backends by name.

All backends tokenize a prompt in the same way: a tokenizer that adds a begin-of-text token does so unless the prompt,
for example from a chat template, already begins with one. Log-probabilities are sums of float32 log-softmax.
"""

from mergegate.tasks.evaluation.backends.contract import CUT_OFF, DEFAULT_BUDGET, AnswerEnd, Backend
from mergegate.tasks.evaluation.backends.registry import find_backend
from mergegate.tasks.evaluation.backends.thinking import ThoughtEnd, find_thought_end
