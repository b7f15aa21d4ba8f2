"""Create signing keys for a test, and a model to sign."""

from __future__ import annotations

import hashlib
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


def write_model(directory: Path) -> Path:
    """Write files whose names sort differently as text and as paths."""
    for name in ("a/z.safetensors", "a b/x.json", "a.txt", "ä.md", ".eval_results/gsm8k.yaml"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return directory


def hashes(model: Path) -> dict[str, str]:
    """Return the sha256 of each file except signatures."""
    files = [
        path for path in model.rglob("*") if path.is_file() and path.name not in ("model.sig", "model.sigstore.json")
    ]
    return {path.relative_to(model).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
