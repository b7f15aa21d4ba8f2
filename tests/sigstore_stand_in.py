"""Run a sigstore instance on loopback: certificate authority, CT log, transparency log and identity provider.

The real client libraries sign and verify against it, with its own trust configuration. The transparency log is Rekor v1
with a real Merkle tree, the authority embeds a real SCT, and the provider has a code flow for browsers and the token
endpoint of GitHub Actions. Identity tokens are JWTs whose signature the authority verifies.

Sources: RFC 6962 (SCT, Merkle tree), RFC 9162, Fulcio's and Rekor's API, C2SP signed notes, OpenID Connect.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import jwt
import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from loopback import Answer, FakeServer, Request, answering, json_answer

EVER = datetime(2020, 1, 1, tzinfo=UTC)
GITHUB_ISSUER = "https://token.actions.githubusercontent.com"
_ISSUER_V1 = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_ISSUER_V2 = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8")
_SCTS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_SECRET = "secret that the provider shares with the authority"


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def der_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


class SigstoreInstance(FakeServer):
    """An instance with its own keys and log.

    ``log_delay`` is the time between a certificate and the entry of its signature in the log.
    """

    def __init__(self) -> None:
        routes = {
            "POST /api/v2/signingCert": self.answer_certificate,
            "POST /api/v1/log/entries": lambda request: json_answer(self.record(request.json), 201),
            "POST /oidc/token": self.answer_login,
            "GET /oidc/.well-known/openid-configuration": lambda request: {
                "authorization_endpoint": f"{self.issuer}/auth",
                "token_endpoint": f"{self.issuer}/token",
            },
            "GET /oidc/auth": self.log_in,
            "GET /github/token": self.answer_job,
        }
        super().__init__(routes)
        self.log_delay = timedelta()
        self.leaves = [b"\0earlier entry"] * 5
        self.authority_key, self.ct_key, self.log_key = new_key(), new_key(), new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stand-in")])
        public = self.authority_key.public_key()
        self.authority = (
            _certificate(name, name, public, EVER, EVER + timedelta(days=36500))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(certificates=True), critical=True)
            .sign(self.authority_key, hashes.SHA256())
        )

    @property
    def requests(self) -> list[str]:
        """Method and path of each request."""
        return [f"{request.method} {request.route}" for request in self.log]

    @property
    def issuer(self) -> str:
        """Address of the identity provider."""
        return f"{self.url}/oidc"

    @property
    def signings(self) -> int:
        """Number of signatures that the log has received."""
        return sum(request.endswith("/api/v1/log/entries") for request in self.requests)

    def token(self, identity: str, issuer: str = "", **claims: object) -> str:
        """Return an identity token. ``claims`` override those of the token."""
        now = int(time.time())
        standard = {"iss": issuer or self.issuer, "sub": identity, "aud": "sigstore", "iat": now, "exp": now + 600}
        return jwt.encode({**standard, **claims}, _SECRET, algorithm="HS256")

    def trust_config(self) -> dict[str, Any]:
        """Return the client trust configuration of the instance."""
        always = {"start": "2020-01-01T00:00:00Z"}

        def service(path: str) -> dict[str, Any]:
            return {"url": f"{self.url}{path}", "majorApiVersion": 1, "validFor": always, "operator": "stand-in"}

        def log(key: ec.EllipticCurvePrivateKey, path: str) -> dict[str, Any]:
            key_details = {"keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": always}
            return {
                "baseUrl": f"{self.url}{path}",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {"rawBytes": base64_text(der_of(key)), **key_details},
                "logId": {"keyId": base64_text(_id(key))},
            }

        authority = {
            "subject": {"organization": "stand-in", "commonName": "stand-in"},
            "uri": self.url,
            "certChain": {"certificates": [{"rawBytes": base64_text(self.authority.public_bytes(Encoding.DER))}]},
            "validFor": always,
        }
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [log(self.log_key, "")],
                "certificateAuthorities": [authority],
                "ctlogs": [log(self.ct_key, "/ct")],
                "timestampAuthorities": [],
            },
            "signingConfig": {
                "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
                "caUrls": [service("")],
                "oidcUrls": [service("/oidc")],
                "rekorTlogUrls": [service("")],
                "rekorTlogConfig": {"selector": "ANY"},
                "tsaUrls": [],
                "tsaConfig": {"selector": "ANY"},
            },
        }

    def write_trust_config(self, directory: Path, name: str = "trust.json") -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(self.trust_config()))
        return directory / name

    def certify(self, token: str, request: x509.CertificateSigningRequest) -> list[str]:
        """Return a certificate for the identity in ``token``, and that of the authority, in PEM."""
        claims = jwt.decode(token, _SECRET, algorithms=["HS256"], audience="sigstore")
        now = datetime.now(UTC).replace(microsecond=0)
        identity = str(claims.get("email") or claims["sub"])
        is_email = "@" in identity and "://" not in identity
        name = x509.RFC822Name(identity) if is_email else x509.UniformResourceIdentifier(identity)
        issuer = str(claims["iss"]).encode()
        public = self.authority_key.public_key()
        builder = (
            _certificate(x509.Name([]), self.authority.subject, request.public_key(), now, now + timedelta(minutes=10))
            .add_extension(_usage(certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER_V1, issuer), critical=False)
            .add_extension(x509.UnrecognizedExtension(_ISSUER_V2, _tlv(0x0C, issuer)), critical=False)
        )
        promised = builder.sign(self.authority_key, hashes.SHA256()).tbs_certificate_bytes
        scts = x509.UnrecognizedExtension(_SCTS, _tlv(0x04, self._sct_list(promised)))
        certificate = builder.add_extension(scts, critical=False).sign(self.authority_key, hashes.SHA256())
        return [each.public_bytes(Encoding.PEM).decode() for each in (certificate, self.authority)]

    def _sct_list(self, precertificate: bytes) -> bytes:
        """Return the promise of the CT log to include a precertificate, as the content of the extension."""
        timestamp = struct.pack("!Q", int(time.time() * 1000))
        issuer = _id(self.authority_key)
        entry = issuer + struct.pack("!I", len(precertificate))[1:] + precertificate
        signature = sign(self.ct_key, b"\0\0" + timestamp + b"\0\1" + entry + b"\0\0")
        sct = b"\0" + _id(self.ct_key) + timestamp + b"\0\0"
        sct += b"\4\3" + struct.pack("!H", len(signature)) + signature  # SHA-256 with ECDSA
        return struct.pack("!H", len(sct) + 2) + struct.pack("!H", len(sct)) + sct

    def record(self, proposed: dict[str, Any]) -> dict[str, Any]:
        """Append a DSSE entry to the log, and return it with its proof of inclusion and its promise."""
        content = proposed["spec"]["proposedContent"]
        envelope = json.loads(content["envelope"])
        payload = base64.b64decode(envelope["payload"])
        (verifier,) = content["verifiers"]
        signature = {"signature": envelope["signatures"][0]["sig"], "verifier": verifier}
        spec = {
            "envelopeHash": _digest(content["envelope"].encode()),
            "payloadHash": _digest(payload),
            "signatures": [signature],
        }
        body = rfc8785.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec})
        self.leaves.append(body)
        index, size = len(self.leaves) - 1, len(self.leaves)
        root, path = _root(self.leaves), _path(index, self.leaves)
        log_id = _id(self.log_key)
        entry: dict[str, Any] = {
            "body": base64_text(body),
            "integratedTime": int((datetime.now(UTC) + self.log_delay).timestamp()),
            "logID": log_id.hex(),
            "logIndex": 1000 + index,  # logs have several trees
        }
        promise = sign(self.log_key, rfc8785.dumps(entry))
        note = f"localhost - 1\n{size}\n{base64_text(root)}\n"
        checkpoint = f"{note}\n\N{EM DASH} localhost {base64_text(log_id[:4] + sign(self.log_key, note.encode()))}\n"
        proof = {"logIndex": index, "rootHash": root.hex(), "treeSize": size, "hashes": [each.hex() for each in path]}
        entry["verification"] = {
            "signedEntryTimestamp": base64_text(promise),
            "inclusionProof": {**proof, "checkpoint": checkpoint},
        }
        return {hashlib.sha256(body).hexdigest(): entry}

    # Handlers

    def answer_certificate(self, request: Request) -> Answer:
        text = base64.b64decode(request.json["certificateSigningRequest"])
        try:
            chain = self.certify(request.token, x509.load_pem_x509_csr(text))
        except jwt.InvalidTokenError as error:
            return json_answer({"code": 16, "message": f"the token {request.token} is not valid: {error}"}, 401)
        return json_answer({"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}})

    def log_in(self, request: Request) -> Answer:
        """Log the user in at once, as alice."""
        code = urlencode({"code": "alice@example.org", "state": request.query["state"]})
        return Answer(302, headers={"Location": f"{request.query['redirect_uri']}?{code}"})

    def answer_login(self, request: Request) -> object:
        identity = parse_qs(request.body.decode())["code"][0]
        return {"access_token": self.token(identity, email=identity)}

    def answer_job(self, request: Request) -> object:
        if request.headers["Authorization"] != "bearer request-secret":
            return Answer(404)
        workflow = "acme/models/.github/workflows/release.yml@refs/heads/main"
        return {"value": self.token(f"https://github.com/{workflow}", GITHUB_ISSUER, job_workflow_ref=workflow)}


def _id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(der_of(key)).digest()


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: Any, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), start, end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(not certificates, False, False, False, False, certificates, False, False, False)


def _digest(data: bytes) -> dict[str, str]:
    return {"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()}


def _tlv(tag: int, value: bytes) -> bytes:
    """Return a value in DER."""
    size = len(value)
    length = bytes([size]) if size < 128 else bytes([0x81, size]) if size < 256 else b"\x82" + struct.pack("!H", size)
    return bytes([tag]) + length + value


def _split(leaves: list[bytes]) -> int:
    """Return the largest power of two below the number of leaves."""
    return int(1 << ((len(leaves) - 1).bit_length() - 1))


def _root(leaves: list[bytes]) -> bytes:
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    middle = _split(leaves)
    return hashlib.sha256(b"\1" + _root(leaves[:middle]) + _root(leaves[middle:])).digest()


def _path(index: int, leaves: list[bytes]) -> list[bytes]:
    """Return the audit path of a leaf (RFC 6962, 2.1.1)."""
    if len(leaves) == 1:
        return []
    middle = _split(leaves)
    if index < middle:
        return [*_path(index, leaves[:middle]), _root(leaves[middle:])]
    return [*_path(index - middle, leaves[middle:]), _root(leaves[:middle])]


@contextmanager
def sigstore_on_loopback() -> Iterator[SigstoreInstance]:
    """Run an instance for the duration of the block."""
    with answering(SigstoreInstance()) as instance:
        yield instance
