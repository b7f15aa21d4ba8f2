"""Read configs, tensor headers, chat templates and tokenizers of checkpoints on disk, but not their weights.

All files are untrusted input. Lengths are checked before they are used, and no pickle is executed.
"""

from mergegate.merge_core.checkpoint.chat_template import (
    DEFAULT,
    TURN_ENDS,
    ChatTemplates,
    ThinkingTemplate,
    find_thinking,
    read_chat_templates,
    select_chat_templates,
    with_chat_templates,
)
from mergegate.merge_core.checkpoint.checkpoint import (
    INDEX_NAME,
    PICKLED_INDEX_NAME,
    PICKLED_SINGLE_NAME,
    SINGLE_NAME,
    Checkpoint,
    class_of,
    equal_bytes,
    is_embedding,
    is_head,
    open_checkpoint,
    settle_head,
    ties_embeddings,
    with_tie,
)
from mergegate.merge_core.checkpoint.companions import (
    MODULES_FILE,
    TEXT_KINDS,
    Companions,
    Kind,
    companion_kind,
    has_vocabulary,
    is_binary_vocabulary,
    is_copyable,
    is_module_file,
    is_template_file,
    list_companions,
    list_uncopied,
    nested_names,
)
from mergegate.merge_core.checkpoint.configuration import CONFIG_KEYS, TEXT_PARTS, config_parts, read_config
from mergegate.merge_core.checkpoint.gguf_file import (
    GgufArray,
    GgufHeader,
    GgufTensor,
    parse_gguf_header,
    read_gguf_header,
)
from mergegate.merge_core.checkpoint.measurements import (
    IMPORTANCE,
    INPUTS,
    ExpectedImportance,
    ExpectedMoments,
    StoredMoments,
    empty_moments,
    measurement_file_name,
    open_importance,
    open_moments,
    pack_moments,
    write_measurement,
)
from mergegate.merge_core.checkpoint.pickled_file import read_pickled
from mergegate.merge_core.checkpoint.quantized_tensors import E4M3_VALUES
from mergegate.merge_core.checkpoint.safetensors_file import fetch_header, read_header, read_into, render_header
from mergegate.merge_core.checkpoint.tensors import (
    BY_CODE,
    BY_TORCH_NAME,
    EXPONENTS,
    RECIPE_NAMES,
    AnyTensor,
    DerivedTensor,
    DType,
    ReadElements,
    ReadStored,
    SizedTensor,
    StoredTensor,
    elements_of,
    numbers,
    patterns,
    promote,
)
