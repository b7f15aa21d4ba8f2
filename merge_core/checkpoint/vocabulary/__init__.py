"""Read tokenizers as data: look up ids of tokens, compare tokenizers, and join several into one.

The package only reads files and does not import a tokenizer library. The ids are those that the tokenizers library
would assign, which can differ from the ids in the file.
"""

from mergegate.merge_core.checkpoint.vocabulary.comparison import (
    SpellingDifference,
    compare_tokenizers,
    settings_differences,
)
from mergegate.merge_core.checkpoint.vocabulary.definition import (
    TOKENIZER_BOUNDS,
    TokenizerDefinition,
    Vocabulary,
    cached_tokenizers,
    read_settings,
    read_tokenizer,
    read_vocabulary,
    vocabulary_differences,
)
from mergegate.merge_core.checkpoint.vocabulary.union import (
    METHODS,
    STRANGERS,
    JoinedTokenizer,
    Strangers,
    TransplantMethod,
    combined_rows,
    join_tokenizers,
    rewritten_files,
    sparse_combinations,
    token_bytes,
)
