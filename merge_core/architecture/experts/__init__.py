"""Experts of a mixture: one by one whatever the checkpoint's layout, matched across models, made of dense ones."""

from mergegate.merge_core.architecture.experts.given import GivenTensor, given
from mergegate.merge_core.architecture.experts.matching import MatchedExperts, MatchedLayer, assign, match_experts
from mergegate.merge_core.architecture.experts.naming import expert_names
from mergegate.merge_core.architecture.experts.outputs import (
    OUTPUT_FAMILIES,
    OutputFamily,
    choose_output,
    mixture_config,
)
from mergegate.merge_core.architecture.experts.pieces import DiskTensor, by_expert, disk_name, on_disk

__all__ = [
    "OUTPUT_FAMILIES",
    "DiskTensor",
    "GivenTensor",
    "MatchedExperts",
    "MatchedLayer",
    "OutputFamily",
    "assign",
    "by_expert",
    "choose_output",
    "disk_name",
    "expert_names",
    "given",
    "match_experts",
    "mixture_config",
    "on_disk",
]
