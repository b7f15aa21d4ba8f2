"""A place in a bucket, and how it is asked: one client, one policy of what is asked again, errors in words.

Credentials are found as boto3 finds them (environment, profile, container, instance, web identity) and are never ours
to hold. boto3 is an extra (``mergegate[s3]``) and is imported when it is first needed.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.tasks.http import TRANSIENT_STATUSES, retry_transient

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from tenacity import Retrying

S3_URL = r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^@\s]*[^@\s/]/?$"
_URL = re.compile(r"s3://(?P<bucket>[^/]+)/(?P<prefix>.+?)/?")
_ATTEMPTS = 6  # half a minute of waiting
CONNECT_S, READ_S = 10.0, 60.0
# What S3 says with a status of 400 or 409, and means "again".
_TRANSIENT_CODES = frozenset({"RequestTimeout", "RequestTimeTooSkewed", "SlowDown", "ConditionalRequestConflict"})
_LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class S3Answer:
    """An object's head: what the store itself says of it.

    Attributes:
        sha256: 64 hex digits, where the store keeps the checksum of the whole object.
        parts_sha256: Where it came in parts: sha256 over the sha256 of each, base64, and how long the parts are.
    """

    size: int
    etag: str
    sha256: str | None
    parts_sha256: tuple[str, int] | None


@dataclass(frozen=True)
class S3Place:
    """``s3://bucket/prefix``, at Amazon or at ``endpoint``."""

    bucket: str
    prefix: str
    endpoint: str | None = None

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def ask(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Call the client, and again while that may help. Only for what may be done twice.

        Raises:
            Exception: the client's own, to be told apart by ``status_code``, or said by ``refusal``.
        """
        client = _client(self.endpoint, CONNECT_S, READ_S)
        call = getattr(client, operation)
        answer: dict[str, Any] = _patiently()(call, Bucket=self.bucket, **parameters)
        return answer

    def key(self, name: str) -> str:
        """The key of what is called ``name`` below the prefix."""
        return f"{self.prefix}/{name}"

    def read(self, name: str) -> tuple[bytes, str] | None:
        """A small object and its entity tag; None where there is none."""

        def get(**parameters: Any) -> tuple[bytes, str]:
            answer = _client(self.endpoint, CONNECT_S, READ_S).get_object(**parameters)
            return answer["Body"].read(), answer["ETag"]

        try:
            found: tuple[bytes, str] = _patiently()(get, Bucket=self.bucket, Key=self.key(name))
        except Exception as error:
            if status_code(error) == 404:
                return None
            raise
        return found

    def stream(self, name: str) -> Any:
        """An object as it comes: has ``iter_chunks``."""
        return self.ask("get_object", Key=self.key(name))["Body"]

    def head(self, name: str) -> S3Answer | None:
        """What the store says of an object; None where there is none."""
        try:
            answer = self.ask("head_object", Key=self.key(name), ChecksumMode="ENABLED")
        except Exception as error:
            if status_code(error) == 404:
                return None
            raise
        said, part = answer.get("ChecksumSHA256"), answer.get("Metadata", {}).get(PART_SIZE, "")
        size, etag = int(answer["ContentLength"]), str(answer["ETag"])
        if said is None:
            return S3Answer(size, etag, None, None)
        checksum = str(said).partition("-")[0]
        if part.isdecimal():
            return S3Answer(size, etag, None, (checksum, int(part)))
        return S3Answer(size, etag, None if "-" in str(said) else base64.b64decode(checksum).hex(), None)

    def objects(self, below: str = "") -> Iterator[tuple[str, int, datetime]]:
        """Name below the prefix, size and time of every object whose name begins with ``below``."""
        more: dict[str, str] = {}
        while True:
            page = self.ask("list_objects_v2", Prefix=self.key(below), **more)
            for one in page.get("Contents", ()):
                yield one["Key"].removeprefix(f"{self.prefix}/"), int(one["Size"]), one["LastModified"]
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def now(self) -> datetime:
        """The store's own clock."""
        headers = self.ask("head_bucket")["ResponseMetadata"]["HTTPHeaders"]
        try:
            return parsedate_to_datetime(headers["date"])
        except (KeyError, ValueError):
            return datetime.now(UTC)


PART_SIZE = "mergegate-part-size"  # in the metadata of an object that came in parts


def s3_place(url: str, endpoint: str | None, where: str) -> S3Place:
    """The place that ``url`` names.

    Raises:
        InvalidInput: when it names none.
    """
    if not re.fullmatch(S3_URL, url) or (form := _URL.fullmatch(url)) is None:
        raise InvalidInput(where, found=repr(url), expected="s3://bucket/prefix", remedy="name bucket and prefix")
    return S3Place(form["bucket"], form["prefix"], endpoint)


def _patiently() -> Retrying:
    return retry_transient(_ATTEMPTS, transient=may_pass, sleep=lambda seconds: time.sleep(seconds))


def encoded_sha256(digest: bytes) -> str:
    """A sha256 as S3 writes it."""
    return base64.b64encode(digest).decode()


def status_code(error: BaseException) -> int | None:
    """The HTTP status that an error of the client is about."""
    response = getattr(error, "response", None)
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, Mapping) else None
    return status if isinstance(status, int) else None


def may_pass(error: BaseException) -> bool:
    """Whether the same request may be answered a moment later."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError

    if isinstance(error, (HTTPClientError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError)):
        return True
    return status_code(error) in TRANSIENT_STATUSES or _code(error) in _TRANSIENT_CODES


def refusal(place: S3Place, error: Exception) -> MergegateError:
    """What to say when the store says no, or nothing. Of the error only its words leave this module."""
    from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

    where = place.url
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return InvalidInput(
            where,
            found="no credentials",
            expected="credentials where boto3 looks for them",
            remedy="export AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; or give this machine a role",
        )
    status = status_code(error)
    if _code(error) == "NoSuchBucket" or (status == 404 and getattr(error, "operation_name", "") == "HeadBucket"):
        return InvalidInput(
            where,
            found=f"there is no bucket {place.bucket}",
            expected="a bucket that exists",
            remedy="create it, or correct 'url' (and 'endpoint', or AWS_ENDPOINT_URL_S3, where it is not Amazon's)",
        )
    if may_pass(error):
        return Refused(
            where,
            found=f"the store does not answer as it should: {_words(error)}",
            expected="a store that answers",
            remedy="run again later: it resumes where it left off",
        )
    if isinstance(error, ClientError) and status in (401, 403):
        return Refused(
            where,
            found=f"the store says no: {_words(error)}",
            expected="the rights to list, read and write there (s3:ListBucket, GetObject, PutObject, DeleteObject, "
            "AbortMultipartUpload)",
            remedy="use other credentials, or have the rights given",
        )
    return Refused(where, found=_words(error), expected="a store that takes a release", remedy="correct what it says")


def require_boto3(where: str) -> None:
    """See that the client is installed.

    Raises:
        InvalidInput: when it is not.
    """
    from importlib.util import find_spec

    if find_spec("boto3") is None:
        raise InvalidInput(
            where, found="boto3 is not installed", expected="the client of S3", remedy="install mergegate[s3]"
        )


def is_of_client(error: BaseException) -> bool:
    """Whether the client or its connection raised it. Anything else is a fault of ours, and is not to look like it."""
    from botocore.exceptions import BotoCoreError, ClientError

    return isinstance(error, (BotoCoreError, ClientError, ConnectionError, TimeoutError))


def _words(error: Exception) -> str:
    response = getattr(error, "response", None)
    said = response.get("Error", {}) if isinstance(response, Mapping) else {}
    text = f"{said.get('Code', '')} {said.get('Message', '')}".strip() or str(error) or type(error).__name__
    return " ".join(text.split())[:_LONGEST_MESSAGE]


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, Mapping) else ""


@cache
def _client(endpoint: str | None, connect_s: float, read_s: float) -> BaseClient:
    """One for each endpoint: it keeps its connections, and may be used by any number of threads."""
    import boto3
    from botocore.config import Config

    settings = Config(
        connect_timeout=connect_s,
        read_timeout=read_s,
        retries={"total_max_attempts": 1, "mode": "standard"},  # ours decide
        # Ours are sha256, of all that matters; others would be in the way of stores that do not know them.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # The checksum is signed and the store compares it: no need to read everything once more to sign it.
        s3={"payload_signing_enabled": False, "addressing_style": "path" if endpoint else "auto"},
    )
    return boto3.session.Session().client("s3", endpoint_url=endpoint, config=settings)
