"""Experts of a mixture: one by one whatever the checkpoint's layout, matched across models, made of dense ones."""

from merge_core.experts.pieces import DiskTensor, by_expert, disk_name, on_disk

__all__ = [
    "DiskTensor",
    "by_expert",
    "disk_name",
    "on_disk",
]
