"""Access a prefix in a bucket: one client, one retry policy, the pointer, and error messages for users.

boto3 finds the credentials (environment, profile, container, instance, web identity); mergegate never holds them. boto3
is an optional dependency (``mergegate[s3]``) and is imported on first use.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused, pip_command
from mergegate.tasks.base.http import TRANSIENT_STATUSES, retry_transient

if TYPE_CHECKING:
    from botocore.client import BaseClient

R = TypeVar("R")
S3_URL = r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^@\s]*[^@\s/]/?$"
PART_SIZE = "mergegate-part-size"  # metadata key of an object that was uploaded in parts
_ATTEMPTS = 6  # half a minute of waiting
CONNECT_S, READ_S = 10.0, 60.0
# Error codes with status 400 or 409 after which S3 expects a retry.
_TRANSIENT_CODES = frozenset({"RequestTimeout", "RequestTimeTooSkewed", "SlowDown", "ConditionalRequestConflict"})
_MAX_MESSAGE_LENGTH = 300
_CHUNK = 1 << 20


@dataclass(frozen=True)
class S3Answer:
    """Metadata of an object, as reported by the store."""

    size: int
    etag: str
    sha256: str | None  # 64 hex digits, if the store has the checksum of the whole object
    # For an object uploaded in parts: the sha256 over the sha256 of each part, in base64, and the size of a part in
    # bytes
    parts_sha256: tuple[str, int] | None


@dataclass(frozen=True)
class S3Location:
    """A location ``s3://bucket/prefix``, at Amazon or at ``endpoint``."""

    bucket: str
    prefix: str
    endpoint: str | None = None

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def ask(self, operation: str, *, ignored_statuses: Collection[int] = (), **parameters: Any) -> dict[str, Any]:
        """Call a method of the client, and retry after transient errors. The request must be safe to repeat.

        Return an empty dict if the store answers with one of the ``ignored_statuses``. Raise Refused for any other
        error of the client, or InvalidInput if credentials or the bucket are missing.
        """
        return (
            self._call(lambda: getattr(self._s3, operation)(Bucket=self.bucket, **parameters), ignored_statuses) or {}
        )

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return the content and the entity tag of a small object, or None if it does not exist."""

        def get() -> tuple[bytes, str]:
            answer = self._s3.get_object(Bucket=self.bucket, Key=self.key(name))
            return answer["Body"].read(), answer["ETag"]

        return self._call(get, (404,))

    def write(self, name: str, content: bytes, **options: str) -> bool:
        """Write a small JSON object. Return false if a guard in ``options`` (IfMatch, IfNoneMatch) prevents it."""
        # 404: the object that IfMatch names has been removed in the meantime.
        no_write = (404, 409, 412) if {"IfMatch", "IfNoneMatch"} & options.keys() else ()
        request = {"Key": self.key(name), "Body": content, "ContentType": "application/json"}
        return bool(self.ask("put_object", ignored_statuses=no_write, **request, **options))

    def send_file(self, key: str, path: Path, **options: str) -> None:
        """Write a file in one request, and read it from the start at every attempt."""

        def put_file() -> None:
            with path.open("rb") as body:
                self._s3.put_object(Bucket=self.bucket, Key=key, Body=body, **options)

        self._call(put_file)

    def stream(self, name: str) -> Iterator[bytes]:
        """Yield the content of an object in chunks."""
        with self._explained_errors():
            yield from self.ask("get_object", Key=self.key(name))["Body"].iter_chunks(_CHUNK)

    def sha256(self, name: str, answer: S3Answer) -> str:
        """Return the sha256 of an object: the store's own checksum, or else the hash of the downloaded content."""
        if answer.sha256 is not None:
            return answer.sha256
        digest = hashlib.sha256()
        for chunk in self.stream(name):
            digest.update(chunk)
        return digest.hexdigest()

    def head(self, name: str) -> S3Answer | None:
        """Return the metadata of an object, or None if it does not exist."""
        answer = self.ask("head_object", ignored_statuses=(404,), Key=self.key(name), ChecksumMode="ENABLED")
        if not answer:
            return None
        encoded, part = answer.get("ChecksumSHA256"), answer.get("Metadata", {}).get(PART_SIZE, "")
        size, etag = int(answer["ContentLength"]), str(answer["ETag"])
        if encoded is None:
            return S3Answer(size, etag, None, None)
        checksum = str(encoded).partition("-")[0]
        if part.isdecimal():
            return S3Answer(size, etag, None, (checksum, int(part)))
        return S3Answer(size, etag, None if "-" in str(encoded) else base64.b64decode(checksum).hex(), None)

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int, datetime]]:
        """Yield name, size and modification time of every object whose name starts with ``prefix``."""
        continuation: dict[str, Any] = {}
        while True:
            page = self.ask("list_objects_v2", Prefix=self.key(prefix), **continuation)
            for item in page.get("Contents", ()):
                yield item["Key"].removeprefix(f"{self.prefix}/"), int(item["Size"]), item["LastModified"]
            if not page.get("IsTruncated"):
                return
            continuation = {"ContinuationToken": page["NextContinuationToken"]}

    def now(self) -> datetime:
        """Return the time of the store's clock, or of this machine's if the store does not report it."""
        headers = self.ask("head_bucket")["ResponseMetadata"]["HTTPHeaders"]
        try:
            return parsedate_to_datetime(headers["date"])
        except (KeyError, ValueError):
            return datetime.now(UTC)

    @property
    def _s3(self) -> Any:
        return _client(self.endpoint, CONNECT_S, READ_S)

    def _call(self, request: Callable[[], R], ignored_statuses: Collection[int] = ()) -> R | None:
        retry = retry_transient(_ATTEMPTS, transient=_is_transient_error, sleep=lambda seconds: time.sleep(seconds))
        with self._explained_errors():
            try:
                return retry(request)
            except Exception as error:
                if _status_code(error) in ignored_statuses:
                    return None
                raise

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Convert errors of the client and its connection. Any other exception is a bug in mergegate."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, ConnectionError, TimeoutError) as error:
            raise _refusal(self, error) from None


def s3_location(url: str, endpoint: str | None, setting: str) -> S3Location:
    """Parse ``url``. Raise InvalidInput at ``setting`` if it is not of the form ``s3://bucket/prefix``."""
    if not re.fullmatch(S3_URL, url):
        raise InvalidInput(
            setting, found=repr(url), expected="s3://bucket/prefix", remedy="specify both a bucket and a prefix"
        )
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return S3Location(bucket, prefix.removesuffix("/"), endpoint)


def encoded_sha256(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _status_code(error: BaseException) -> int | None:
    """Return the HTTP status in an exception of the client, or None."""
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _response(error: BaseException) -> Mapping[str, Any]:
    response = getattr(error, "response", None)
    return response if isinstance(response, Mapping) else {}


def _is_transient_error(error: BaseException) -> bool:
    """Return whether the error is transient, so that the same request may succeed later."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError

    if isinstance(error, (HTTPClientError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError)):
        return True
    return _status_code(error) in TRANSIENT_STATUSES or _code(error) in _TRANSIENT_CODES


def _refusal(location: S3Location, error: Exception) -> MergegateError:
    """Convert an exception of the client to an error for the user, which keeps only the message."""
    from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

    url = location.url
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return InvalidInput(
            url,
            found="no credentials",
            expected="credentials in one of the places that boto3 searches",
            remedy="export AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role",
        )
    status = _status_code(error)
    if _code(error) == "NoSuchBucket" or (status == 404 and getattr(error, "operation_name", "") == "HeadBucket"):
        return InvalidInput(
            url,
            found=f"there is no bucket {location.bucket}",
            expected="an existing bucket",
            remedy="create it, or correct 'url' (for a store other than Amazon's, also 'endpoint' or "
            "AWS_ENDPOINT_URL_S3)",
        )
    details = _response(error).get("Error", {})
    text = f"{details.get('Code', '')} {details.get('Message', '')}".strip() or str(error) or type(error).__name__
    message = " ".join(text.split())[:_MAX_MESSAGE_LENGTH]
    if _is_transient_error(error):
        return Refused(
            url,
            found=f"the store does not answer as expected: {message}",
            expected="a valid answer",
            remedy="run again later; mergegate resumes the publication",
        )
    if isinstance(error, ClientError) and status in (401, 403):
        return Refused(
            url,
            found=f"the store denies access: {message}",
            expected="permission to list, read and write (s3:ListBucket, GetObject, PutObject, DeleteObject, "
            "AbortMultipartUpload)",
            remedy="use other credentials, or ask for these permissions",
        )
    remedy = "correct the problem that the store reports"
    return Refused(url, found=message, expected="a store that accepts a release", remedy=remedy)


def require_boto3(location: str) -> None:
    """Raise InvalidInput if boto3 is not installed."""
    from importlib.util import find_spec

    if find_spec("boto3") is None:
        raise InvalidInput(
            location, found="boto3 is not installed", expected="the client for S3", remedy=pip_command("mergegate[s3]")
        )


@cache
def _client(endpoint: str | None, connect_s: float, read_s: float) -> BaseClient:
    """Return the shared client of an endpoint. It keeps its connections and is thread-safe."""
    import boto3
    from botocore.config import Config

    settings = Config(
        connect_timeout=connect_s,
        read_timeout=read_s,
        retries={"total_max_attempts": 1, "mode": "standard"},  # mergegate retries
        # mergegate sends sha256 checksums where they matter; some stores do not support other algorithms.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # The checksum is signed and the store verifies it, so signing need not read the whole payload again.
        s3={"payload_signing_enabled": False, "addressing_style": "path" if endpoint else "auto"},
    )
    return boto3.session.Session().client("s3", endpoint_url=endpoint, config=settings)
