"""Derive the structure of networks from tensor names and configurations: layers and their kinds, heads, parts, layouts.

Facts about single families are data in ``families/``. The code applies to all families.
"""

from mergegate.merge_core.architecture.architecture import (
    class_difference,
    dtype_in,
    find_tensor,
    has_own_head,
    has_vocabulary_rows,
    is_base_class,
    is_optional,
    layer_count,
    vocabulary_size,
    with_dtype,
    with_vocabulary,
)
from mergegate.merge_core.architecture.conversions import Conversions, InMemory
from mergegate.merge_core.architecture.families import described_families, family_defaults, family_trials, text_part
from mergegate.merge_core.architecture.layer_kinds import layer_kinds
from mergegate.merge_core.architecture.layouts import rename_to_layout
from mergegate.merge_core.architecture.loading import keeps_float32, loading_of, tied_source, without_predictions
from mergegate.merge_core.architecture.meaning import differing_settings
from mergegate.merge_core.architecture.model_kinds import (
    TEXT_GENERATOR,
    ModelKind,
    TaskForm,
    class_kinds,
    find_kind,
    kind_of,
    kind_of_directory,
)
from mergegate.merge_core.architecture.parts import (
    is_of_head,
    is_of_tower,
    main_depth,
    main_stack,
    positions_outside_layers,
    prediction_tensors,
    unloaded_tensors,
)
from mergegate.merge_core.architecture.stacking import LayerOrigin, keeps_layer_positions, stacked_config
from mergegate.merge_core.architecture.tensor_kinds import (
    KINDS,
    TensorKind,
    input_width,
    is_before_layers,
    is_inputs_first,
    is_projection,
    is_routed_expert,
    parse_layer_place,
    stacks,
    tensor_kind,
)
from mergegate.merge_core.checkpoint import is_embedding, is_head, ties_embeddings
