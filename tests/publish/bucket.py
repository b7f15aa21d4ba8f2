"""Run S3 on loopback: moto's server in a thread, behind a proxy that injects faults and verifies checksums."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from faulty_proxy import FaultyProxy, faulty_proxy
from loopback import Answer, Request, answering

BUCKET = "models"
AWS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "an-example-secret", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}  # fmt: skip


def _bad_digest(request: Request) -> Answer | None:
    expected = request.headers.get("x-amz-checksum-sha256")
    if request.method != "PUT" or expected in (None, _checksum(request.body)):
        return None
    error = b"<Error><Code>BadDigest</Code><Message>The SHA256 you specified did not match.</Message></Error>"
    return Answer(400, error, {"Content-Type": "application/xml"})


def _checksum(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


class S3OnLoopback:
    """S3 server with one bucket. ``url`` goes through the proxy, and ``client`` bypasses it."""

    def __init__(self, proxy: FaultyProxy, client: Any) -> None:
        self.proxy, self.client = proxy, client

    @property
    def url(self) -> str:
        return self.proxy.url

    @property
    def _bucket(self) -> Any:
        """The bucket in moto's memory in this process, so that reading it sends no request."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET]

    def objects(self) -> dict[str, bytes]:
        """Return the content of every object by key."""
        return {key: found.value for key, found in sorted(self._bucket.keys.items())}

    def read(self, key: str) -> bytes:
        return bytes(self._bucket.keys[key].value)

    def put_back(self, kept: Mapping[str, bytes]) -> None:
        """Restore the bucket to exactly these objects."""
        there = self._bucket.keys
        for key in list(there.keys()):
            if key not in kept:
                there.pop(key)
        for key, content in kept.items():
            if key not in there or there[key].value != content:
                self.write(key, content)

    def write(self, key: str, content: bytes) -> None:
        """Write an object as another authorized client would."""
        checksum = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": _checksum(content)}
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content, **checksum)

    @contextmanager
    def found_by_clients(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Configure boto3 and fsspec for this server as a user would. Drop their cached clients before and after."""
        import s3fs

        from mergegate.tasks.release.publish.targets import s3_access as access

        for name, value in {**AWS, "AWS_ENDPOINT_URL_S3": self.url}.items():
            patch.setenv(name, value)
        for forget in (forgets := (access._client.cache_clear, s3fs.S3FileSystem.clear_instance_cache)):
            forget()
        yield
        for forget in forgets:
            forget()

    def empty(self) -> None:
        """Remove every object and every unfinished upload."""
        self.put_back({})
        for one in self.uploads():
            self.client.abort_multipart_upload(Bucket=BUCKET, Key=one["Key"], UploadId=one["UploadId"])

    def uploads(self) -> list[Any]:
        return list(self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads") or ())


@contextmanager
def s3_on_loopback() -> Iterator[S3OnLoopback]:
    """Run the server with one empty bucket named ``models``."""
    import boto3
    from botocore.config import Config
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    with answering(make_server("127.0.0.1", 0, application, threaded=True)) as server:
        url = f"http://127.0.0.1:{server.port}"
        client = boto3.session.Session().client(
            "s3", endpoint_url=url, region_name=AWS["AWS_DEFAULT_REGION"], aws_access_key_id=AWS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=AWS["AWS_SECRET_ACCESS_KEY"],
            config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
        )  # fmt: skip
        client.create_bucket(Bucket=BUCKET)
        with faulty_proxy(url, _bad_digest) as proxy:
            yield S3OnLoopback(proxy, client)
