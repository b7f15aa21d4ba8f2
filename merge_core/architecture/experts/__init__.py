"""Handle mixtures of experts: split fused experts, match experts across models, and build mixtures of dense models."""

from mergegate.merge_core.architecture.experts.computed_tensors import constant_tensor
from mergegate.merge_core.architecture.experts.matching import (
    MatchedExperts,
    MatchedLayer,
    StoredRouter,
    assign,
    find_routers,
    match_experts,
    read_routers,
)
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
from mergegate.merge_core.architecture.experts.router_fit import (
    RoutedText,
    RouterFit,
    RouterScore,
    RoutingError,
    fit_router,
    routing_error,
)

__all__ = [
    "DiskTensor",
    "MatchedExperts",
    "MatchedLayer",
    "OutputFamily",
    "RoutedText",
    "RouterFit",
    "RouterScore",
    "RoutingError",
    "StoredRouter",
    "assign",
    "choose_output",
    "constant_tensor",
    "disk_name",
    "expert_names",
    "find_routers",
    "fit_router",
    "match_experts",
    "mixture_config",
    "read_routers",
    "routing_error",
    "split_experts",
    "to_disk_tensors",
]
