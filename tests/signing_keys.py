"""Create signing keys for a test."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_keys(directory: Path, curve: ec.EllipticCurve | None = None, name: str = "release") -> tuple[Path, Path]:
    """Write a new key pair in PEM format, and return the paths of the private and the public key."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    private, public = directory / f"{name}.key", directory / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public
