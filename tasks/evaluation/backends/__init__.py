"""What answers lm-eval's requests about a model: one file a backend, and the registry that finds it by name.

All of them read a prompt alike: a tokenizer that adds a begin of text adds one, and none where the prompt (a chat
template's) begins with it; log-probabilities are sums of float32 log-softmax.
"""

from mergegate.tasks.evaluation.backends.contract import CUT_OFF, AnswerEnd, Backend
from mergegate.tasks.evaluation.backends.registry import backend_names, find_backend

__all__ = ["CUT_OFF", "AnswerEnd", "Backend", "backend_names", "find_backend"]
