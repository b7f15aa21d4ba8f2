"""Define the publication settings that all targets share: version name, signing key and manual approval.

::

    publish: {to: hub, repo: acme/support, approval: true}                    # rejected after three days without answer
    publish: {to: hub, repo: acme/support, approval: {timeout: 12 h}}

Each target adds settings of its own (see ``targets``).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.parsing import LocalPath
from mergegate.merge_core.wording import parse_duration
from mergegate.tasks.stage import TimeSpan


class ApprovalSettings(BaseModel):
    """Manual approval before a release is published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout: TimeSpan = Field(
        default="3 d", description="Time after which a missing answer rejects the release, such as 12 h. Default: 3 d."
    )

    @property
    def timeout_s(self) -> float:
        return parse_duration(self.timeout, "timeout")


class PublishSettings(BaseModel):
    """Settings that all targets share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of this version. Default: the first 12 hex digits of the content hash.",
    )
    sign_key: LocalPath | None = Field(
        default=None,
        description="EC private key (P-256, PEM) that signs every file of the release. Default: no signature.",
    )
    approval: ApprovalSettings | bool = Field(
        default=False, description="Whether a user must approve the release before it is published. Default: false."
    )

    @property
    def approval_settings(self) -> ApprovalSettings | None:
        """Approval settings, or None if publication needs no approval."""
        if isinstance(self.approval, bool):
            return ApprovalSettings() if self.approval else None
        return self.approval
