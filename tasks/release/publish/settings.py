"""Define the publication settings that all targets share: version name, signing key and manual approval.

::

    publish: {to: hub, repo: acme/support, approval: true}                    # rejected after three days without answer
    publish: {to: hub, repo: acme/support, approval: {timeout: 12 h}}
    publish: {to: hub, repo: acme/support, sign: sigstore}                    # keyless, with the identity of the job

Each target adds settings of its own (see ``targets``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import LocalPath
from mergegate.merge_core.wording import parse_duration
from mergegate.tasks.base.stage import TimeSpan


class ApprovalSettings(BaseModel):
    """Manual approval before a release is published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout: TimeSpan = Field(
        default="3 d", description="Time after which a missing answer rejects the release, such as 12 h. Default: 3 d."
    )

    @property
    def timeout_s(self) -> float:
        return parse_duration(self.timeout, "timeout")


class SigstoreSettings(BaseModel):
    """Keyless signature with sigstore: a certificate for an OIDC identity, recorded in a transparency log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trust_config: LocalPath | None = Field(
        default=None,
        description="Sigstore's client trust configuration (JSON) of a private instance. Default: the public instance.",
    )


_Text = Annotated[str, Field(min_length=1, max_length=2000)]


class Supplier(BaseModel):
    """Organization or user that publishes the release."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Text = Field(description="Name of the organization or user.")
    url: str | None = Field(default=None, pattern=r"^https?://\S+$", description="Web page. Default: none.")
    contact: str | None = Field(
        default=None,
        pattern=r"^(https?://\S+|[^@\s]+@[^@\s]+)$",
        description="Email address or web page for questions. Default: none.",
    )


class AboutRelease(BaseModel):
    """Statements about the release that only its publisher can make.

    The model card, the compliance sheet and the bill of materials repeat them. mergegate does not check them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    supplier: Supplier | None = Field(
        default=None, description="Publisher of the release. Default: the namespace of the Hub repository, if any."
    )
    intended_use: tuple[_Text, ...] = Field(default=(), description="Intended uses, one sentence each. Default: none.")
    out_of_scope: tuple[_Text, ...] = Field(
        default=(), description="Uses that the model is not intended for, one sentence each. Default: none."
    )
    limits: tuple[_Text, ...] = Field(
        default=(), description="Known limits of the model, one sentence each. Default: none."
    )
    training_compute: dict[str, Annotated[float, Field(gt=0, le=1e32, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="Floating-point operations of the original training, by parent as written in the recipe, such as "
        "{acme/base: 6.0e22}. Default: the value in the parent's card, if any.",
    )

    def require_parents(self, references: Iterable[str]) -> None:
        """Raise InvalidInput if ``training_compute`` names a model that is not one of these parents."""
        known = set(references)
        for name in self.training_compute:
            if name not in known:
                raise InvalidInput(
                    f"publish.about.training_compute[{name!r}]",
                    found="a model that the recipe does not merge",
                    expected="a parent as written in the recipe",
                    remedy=suggest(name, known),
                )


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
    sign: Literal["sigstore"] | SigstoreSettings | None = Field(
        default=None,
        description="Keyless signature: sigstore, or {trust_config: FILE} for a private instance. mergegate uses the "
        "identity of the CI job, or of a user who logs in with a browser. Default: no keyless signature.",
    )
    about: AboutRelease = Field(
        default_factory=AboutRelease,
        description="Statements for the card, the compliance sheet and the bill of materials. Default: none.",
    )
    approval: ApprovalSettings | bool = Field(
        default=False, description="Whether a user must approve the release before it is published. Default: false."
    )

    @property
    def sigstore(self) -> SigstoreSettings | None:
        """Settings of the keyless signature, or None if there is none."""
        return SigstoreSettings() if self.sign == "sigstore" else self.sign

    @property
    def approval_settings(self) -> ApprovalSettings | None:
        """Approval settings, or None if publication needs no approval."""
        if isinstance(self.approval, bool):
            return ApprovalSettings() if self.approval else None
        return self.approval
