"""Measure the likelihood of held-out text, document by document, under one model or under all parents together."""

from mergegate.tasks.quality.perplexity.measurement import (
    DocumentLikelihood,
    TokenizedText,
    WindowSettings,
    encode_text,
    read_held_out,
)
from mergegate.tasks.quality.perplexity.settings import DriftLimits, Percentage, PerplexitySettings
from mergegate.tasks.quality.perplexity.stage import (
    LIKELIHOODS_FILE,
    Likelihoods,
    ensemble_gain_share,
    ensemble_likelihoods,
    perplexity,
    pin_documents,
    read_documents,
    sum_documents,
    write_documents,
)
from mergegate.tasks.quality.perplexity.text import (
    ChatMessage,
    DistinctDocuments,
    HeldOutText,
    OwnDocument,
    TextSetting,
    pin_text,
    read_distinct,
    read_documents_verbatim,
    read_texts,
)
