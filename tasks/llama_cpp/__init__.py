"""Talk to llama.cpp, which runs in a process and an environment of its own.

All other code reaches llama.cpp through this package: ``open_gguf`` tokenizes, scores, generates and chats,
``quantize`` writes quantized files, and ``toolchain`` returns versions. ``merge_core.checkpoint.read_gguf_header``
reads the header of a file without llama.cpp.
"""

from mergegate.tasks.llama_cpp.client import (
    CONVERTER,
    FILE_TYPES,
    AnswerChoice,
    LlamaCpp,
    environment_error,
    file_type,
    find_python,
    measure_importance,
    open_gguf,
    quantize,
    runtime_versions,
    toolchain,
)
from mergegate.tasks.llama_cpp.loading import BACKEND_NAME, GgufNetwork, close_gguf, load_gguf, runs_in_llama_cpp
