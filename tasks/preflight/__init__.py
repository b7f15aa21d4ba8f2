"""Everything that can be wrong, found before any weight is read: compatibility, machine, licences."""

from tasks.preflight.compat import Compatibility, Remark, check_compatibility, header_digests, remark_of
from tasks.preflight.machine import machine_remarks, require_machine, this_machine

__all__ = [
    "Compatibility",
    "Remark",
    "check_compatibility",
    "header_digests",
    "machine_remarks",
    "remark_of",
    "require_machine",
    "this_machine",
]
