"""Turn the model names in a recipe into pinned checkpoints, and load those checkpoints into memory.

A checkpoint is a local directory or a Hub repository. This package resolves it, reads its tensor headers, downloads
its weights, and pins it by a digest of its files, so that a run notices when a file changes. It then loads the model
in the current process or in the model process.
"""

from mergegate.tasks.models.checkpoints.card import (
    CARD_FILE,
    NO_CARD,
    NO_FRONT_MATTER,
    ModelCard,
    card_directory,
    card_path,
    parse_card,
    read_card,
)
from mergegate.tasks.models.checkpoints.class_tensors import Differences, compare_with_classes
from mergegate.tasks.models.checkpoints.model import (
    Model,
    QuantizedModel,
    deciding_files,
    files_fingerprint,
    require_same_files,
)
from mergegate.tasks.models.checkpoints.model_cache import (
    LoadedModel,
    OutOfModelMemory,
    accept_plain_content,
    gpu_memory,
    import_lean,
    is_out_of_memory,
    load_model,
    load_private_model,
    on_unload,
    tokenizer_digest,
    torch_threads,
    unload_models,
)
from mergegate.tasks.models.checkpoints.model_process import (
    CallNeeds,
    TellProgress,
    call_model_process,
    end_model_process,
    start_model_process,
)
from mergegate.tasks.models.checkpoints.parent_weights import (
    apply_adapters,
    apply_adapters_outside_flow,
    download_snapshots,
    fetch_weights,
    find_applied_adapters,
)
from mergegate.tasks.models.checkpoints.pin import (
    PinnedAdapter,
    PinnedCheckpoint,
    PinnedRecipe,
    ResolvedAdapter,
    ResolvedCheckpoint,
    adapted_digest,
    adapter_digest,
    adapter_files_digest,
    adapter_findings_of_parents,
    checkpoint_digest,
    files_digest,
    find_checkpoint,
    find_pinned_checkpoints,
    identify_parents,
    open_parent,
    pin_checkpoints,
    require_combinable,
    resolve_all_parents,
    resolve_parents,
    search_parents,
    size_of_adapter,
)
from mergegate.tasks.models.checkpoints.project_access import (
    child_environment,
    confinement,
    expect_inputs,
    named_files,
    writable_directory,
)
