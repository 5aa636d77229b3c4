"""What boto3 raises, as errors that say what to do, and carry nothing of the request: no credentials, no content."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from boto3.exceptions import Boto3Error
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)

from fencepost.schemas.errors import ConfigError, Damaged, FencepostError, Unreachable

__all__ = ["code", "status", "typed"]

CODE = re.compile(r"[A-Za-z0-9.]{1,64}")
ACTIONS = "GetObject, PutObject, DeleteObject, ListBucket, ListBucketMultipartUploads and AbortMultipartUpload"
NOT_LET_IN = frozenset({"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"})
WRONG_NAMES = frozenset({"NoSuchBucket", "InvalidBucketName", "PermanentRedirect"})
TRY_AGAIN = frozenset(
    {
        *("RequestTimeout", "SlowDown", "ConditionalRequestConflict", "OperationAborted"),
        # Tidied away while it was sent.
        "NoSuchUpload",
        # Changed or cut on its way.
        *("BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
    }
)


def code(error: ClientError) -> str:
    """The server's own word for it."""
    found = str(error.response.get("Error", {}).get("Code", ""))
    return found if CODE.fullmatch(found) else "unknown"


def status(error: ClientError) -> int:
    """The status of the answer over HTTP."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def typed() -> Generator[None]:
    """Turns what boto3 raises into errors that say what to do, and carry nothing of the request."""
    try:
        yield
    except ClientError as error:
        raise _refused(code(error), status(error)) from None
    except FlexibleChecksumError:
        raise Damaged("the content does not have its checksum", field="object", hint="put it again") from None
    except (ConnectionError, HTTPClientError, IncompleteReadError) as error:
        raise Unreachable(
            f"the object store did not answer to the end: {type(error).__name__}", field="store", hint="try again"
        ) from None
    except (NoCredentialsError, PartialCredentialsError):
        raise ConfigError("no credentials found", field="credentials", hint="give boto3 those of the store") from None
    except (BotoCoreError, Boto3Error) as error:
        raise ConfigError(
            f"boto3 refused the request: {type(error).__name__}", field="store", hint="look at its configuration"
        ) from None


def _refused(word: str, number: int) -> FencepostError:
    if word in TRY_AGAIN or number in (429, 500, 502, 503, 504):
        return Unreachable(f"the object store asks to try again: {word}", field="store", hint="try again")
    if word in WRONG_NAMES:
        return ConfigError(f"there is no such bucket: {word}", field="bucket", hint="make it, or give its right name")
    if word in NOT_LET_IN or number in (401, 403):
        return ConfigError(
            f"the credentials are not accepted for this: {word}", field="credentials", hint=f"they need {ACTIONS}"
        )
    if number == 501:
        return ConfigError(
            f"the object store cannot do this: {word}", field="store", hint="for a put: pass conditional=False"
        )
    return ConfigError(f"the object store refused the request: {word}", field="store", hint="look its code up")
