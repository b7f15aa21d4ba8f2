"""Talk to llama.cpp, which runs in a process and an environment of its own.

All other code reaches llama.cpp through this package: ``open_gguf`` tokenizes, scores, generates and chats,
``quantize`` writes quantized files, and ``toolchain`` returns versions. ``merge_core.checkpoint.read_gguf_header``
reads the header of a file without llama.cpp.
"""

from mergegate.tasks.models.llama_cpp.client import (
    BACKEND_NAME,
    CONVERTER,
    FILE_TYPES,
    AnswerChoice,
    GgufNetwork,
    LlamaCpp,
    close_gguf,
    environment_error,
    find_python,
    load_gguf,
    measure_importance,
    open_gguf,
    quantize,
    runs_in_llama_cpp,
    runtime_versions,
    toolchain,
)
