"""Talk to llama.cpp, which runs in a process and an environment of its own, and read GGUF files without it.

All other code reaches llama.cpp through this package: ``open_gguf`` tokenizes, scores, generates and chats, and
``quantize`` writes quantized files. ``read_gguf`` reads the header of a file without llama.cpp.
"""

from mergegate.tasks.llama_cpp.client import (
    CONVERTER,
    FILE_TYPES,
    AnswerChoice,
    ChatAnswer,
    GgufVocabulary,
    LlamaCpp,
    ScoredTokens,
    file_type,
    find_python,
    open_gguf,
    quantize,
    runtime_versions,
    toolchain,
)
from mergegate.tasks.llama_cpp.header import GgufHeader, GgufTensor, read_gguf

__all__ = [
    "CONVERTER",
    "FILE_TYPES",
    "AnswerChoice",
    "ChatAnswer",
    "GgufHeader",
    "GgufTensor",
    "GgufVocabulary",
    "LlamaCpp",
    "ScoredTokens",
    "file_type",
    "find_python",
    "open_gguf",
    "quantize",
    "read_gguf",
    "runtime_versions",
    "toolchain",
]
