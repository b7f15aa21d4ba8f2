"""Tokenizers as data: which text has which id, what two of them disagree about, and one made of several.

Only files are read and no tokenizer library is imported: what a tokenizer *does* with a text is asked elsewhere, of a
process of its own. The ids are those that the library gives, which are not always those that the file says.
"""

from mergegate.merge_core.checkpoint.vocabulary.comparison import (
    SpellingDifference,
    compare_tokenizers,
    settings_differences,
)
from mergegate.merge_core.checkpoint.vocabulary.definition import (
    TOKENIZER_BOUNDS,
    TokenizerDefinition,
    cached_tokenizers,
    read_settings,
    read_tokenizer,
)
from mergegate.merge_core.checkpoint.vocabulary.spelling import token_bytes
from mergegate.merge_core.checkpoint.vocabulary.tokens import Vocabulary, read_vocabulary, vocabulary_differences
from mergegate.merge_core.checkpoint.vocabulary.transplant import (
    METHODS,
    TransplantMethod,
    combined_rows,
    sparse_combinations,
)
from mergegate.merge_core.checkpoint.vocabulary.union import (
    STRANGERS,
    JoinedTokenizer,
    Strangers,
    join_tokenizers,
    rewritten_files,
)

__all__ = [
    "METHODS",
    "STRANGERS",
    "TOKENIZER_BOUNDS",
    "JoinedTokenizer",
    "SpellingDifference",
    "Strangers",
    "TokenizerDefinition",
    "TransplantMethod",
    "Vocabulary",
    "cached_tokenizers",
    "combined_rows",
    "compare_tokenizers",
    "join_tokenizers",
    "read_settings",
    "read_tokenizer",
    "read_vocabulary",
    "rewritten_files",
    "settings_differences",
    "sparse_combinations",
    "token_bytes",
    "vocabulary_differences",
]
