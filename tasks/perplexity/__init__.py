"""Likelihood of held-out text, document by document: of one model, and of all parents together."""

from mergegate.tasks.perplexity.ensemble import ensemble_likelihoods, gain_kept
from mergegate.tasks.perplexity.measuring import (
    DocumentLikelihood,
    HeldOutReading,
    WindowSettings,
    encode_text,
    read_held_out,
)
from mergegate.tasks.perplexity.stage import (
    DriftLimits,
    Likelihoods,
    PerplexitySettings,
    perplexity,
    pin_documents,
    read_documents,
)
from mergegate.tasks.perplexity.text import (
    ChatMessage,
    HeldOutText,
    OwnDocument,
    pin_text,
    read_own_documents,
    read_texts,
)

__all__ = [
    "ChatMessage",
    "DocumentLikelihood",
    "DriftLimits",
    "HeldOutReading",
    "HeldOutText",
    "Likelihoods",
    "OwnDocument",
    "PerplexitySettings",
    "WindowSettings",
    "encode_text",
    "ensemble_likelihoods",
    "gain_kept",
    "perplexity",
    "pin_documents",
    "pin_text",
    "read_documents",
    "read_held_out",
    "read_own_documents",
    "read_texts",
]
