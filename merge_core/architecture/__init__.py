"""Derive the structure of networks from tensor names and configurations: layers and their kinds, heads, parts, layouts.

Facts about single families are data in ``families/``. The code applies to all families.
"""

from mergegate.merge_core.architecture.conversions import (
    Conversions,
    InMemory,
    keeps_float32,
    loading_of,
    packaged_table,
    tied_source,
    without_predictions,
)
from mergegate.merge_core.architecture.families import (
    described_families,
    family_defaults,
    family_trials,
    layer_kinds,
    text_part,
)
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
from mergegate.merge_core.architecture.stacking import LayerOrigin, keeps_layer_positions, stacked_config
from mergegate.merge_core.architecture.structure import (
    KINDS,
    TensorKind,
    class_difference,
    dtype_in,
    find_tensor,
    has_own_head,
    has_vocabulary_rows,
    input_width,
    is_base_class,
    is_before_layers,
    is_inputs_first,
    is_of_head,
    is_of_tower,
    is_optional,
    is_projection,
    is_routed_expert,
    layer_count,
    main_depth,
    main_stack,
    parse_layer_place,
    positions_outside_layers,
    prediction_tensors,
    rename_to_layout,
    stacks,
    tensor_kind,
    unloaded_tensors,
    vocabulary_size,
    with_dtype,
    with_vocabulary,
)
from mergegate.merge_core.checkpoint import is_embedding, is_head, ties_embeddings
