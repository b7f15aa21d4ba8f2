"""Handle mixtures of experts: split fused experts, match experts across models, and build mixtures of dense models."""

from mergegate.merge_core.architecture.experts.computed_tensors import constant_tensor
from mergegate.merge_core.architecture.experts.matching import MatchedExperts, MatchedLayer, assign, match_experts
from mergegate.merge_core.architecture.experts.outputs import (
    OutputFamily,
    choose_output,
    mixture_config,
)
from mergegate.merge_core.architecture.experts.pieces import (
    DiskTensor,
    disk_name,
    expert_names,
    split_experts,
    to_disk_tensors,
)

__all__ = [
    "DiskTensor",
    "MatchedExperts",
    "MatchedLayer",
    "OutputFamily",
    "assign",
    "choose_output",
    "constant_tensor",
    "disk_name",
    "expert_names",
    "match_experts",
    "mixture_config",
    "split_experts",
    "to_disk_tensors",
]
