"""Handle mixtures of experts: split fused experts, match experts across models, and fit routers."""

from mergegate.merge_core.architecture.experts.matching import (
    MatchedExperts,
    MatchedLayer,
    assign,
    find_routers,
    match_experts,
    read_routers,
)
from mergegate.merge_core.architecture.experts.pieces import (
    DiskTensor,
    constant_tensor,
    disk_name,
    split_experts,
    to_disk_tensors,
)
from mergegate.merge_core.architecture.experts.router_fit import RoutedText, RouterScore, fit_router, routing_error
