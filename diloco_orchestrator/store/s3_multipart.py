"""`MultipartUploads`: writes of S3 objects in parts, for objects that are too large for one request.

obstore has no create-only mode for such uploads, so they go through boto3: the request that completes the upload has
the header `If-None-Match: *`. Before it nothing is visible, so a writer that dies leaves no object; the parts it sent
stay in the bucket until a lifecycle rule (AbortIncompleteMultipartUpload) removes them.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError  # type: ignore[import-untyped]

from diloco_orchestrator.errors import StoreError, StoreUnavailable
from diloco_orchestrator.store.s3_errors import BY_CODE, retry_after_s, store_error

PART_SIZE = 32 * 2**20  # bytes; each thread holds one part beside the object
_THREADS = 4
_MOST_PARTS = 10_000  # S3's limit
_EXISTS = ("PreconditionFailed", "412")


class MultipartUploads:
    """Multipart writes below `prefix` of a bucket. `make_client` is called once, at the first upload.

    The client may retry single requests: a part sent twice is the same part, and a completion whose reply was lost
    shows in the caller's next `create`.
    """

    def __init__(self, make_client: Callable[[], Any], bucket: str, prefix: str, part_size: int = PART_SIZE) -> None:
        self._make_client = make_client
        self._made: Any = None
        self._making = Lock()  # of writers at once: a client takes .2 s of CPU time
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_size = part_size

    def create(self, key: str, data: bytes) -> bool:
        """Write an object only if none exists. Exactly one of any number of racing writers gets True.

        Raises `StoreUnavailable` for a transient fault, also if another writer completed at the same moment.
        """
        where = {"Bucket": self._bucket, "Key": self._prefix + key}
        with _translated(f"cannot create {key}"):
            return not self._exists(where) and self._upload(where, data, {"IfNoneMatch": "*"})

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing an existing one in one step."""
        with _translated(f"cannot write {key}"):
            self._upload({"Bucket": self._bucket, "Key": self._prefix + key}, data, {})

    @property
    def _client(self) -> Any:
        with self._making:
            if self._made is None:
                self._made = self._make_client()
            return self._made

    def _exists(self, where: dict[str, str]) -> bool:
        try:
            self._client.head_object(**where)
        except ClientError as error:
            if _code(error) in ("404", "NoSuchKey", "NotFound"):
                return False
            raise
        return True

    def _upload(self, where: dict[str, str], data: bytes, condition: dict[str, str]) -> bool:
        """Send `data` in parts and complete the upload. Returns False if S3 refuses because the object exists.

        `where`: bucket and key. `condition`: arguments of the completing request, such as create-only. After any error
        the sent parts are removed.
        """
        client = self._client
        upload = {**where, "UploadId": client.create_multipart_upload(**where)["UploadId"]}
        try:
            parts = self._send_parts(upload, data)
            client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)
        except BaseException as error:  # after an interrupt too, because incomplete uploads cost money
            with suppress(BotoCoreError, ClientError):  # the first error is more informative
                client.abort_multipart_upload(**upload)
            if isinstance(error, ClientError) and _code(error) in _EXISTS:
                return False
            raise
        return True

    def _send_parts(self, upload: dict[str, str], data: bytes) -> list[dict[str, Any]]:
        size = max(self._part_size, -(-len(data) // _MOST_PARTS))
        starts = range(0, len(data), size)

        def send(number: int) -> dict[str, Any]:
            start = starts[number - 1]
            sent = self._client.upload_part(**upload, PartNumber=number, Body=data[start : start + size])
            return {"PartNumber": number, "ETag": sent["ETag"]}

        with ThreadPoolExecutor(_THREADS) as pool:
            parts = [pool.submit(send, number) for number in range(1, len(starts) + 1)]
            try:
                return [part.result() for part in parts]
            except BaseException:  # an interrupt too
                pool.shutdown(wait=True, cancel_futures=True)  # no part is sent after the upload was aborted
                raise


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Context that turns boto3's errors into ours."""
    try:
        yield
    except ClientError as error:
        code = _code(error)
        kind, remedy = BY_CODE.get(code, (StoreError, ""))
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
            kind = StoreUnavailable if code not in BY_CODE else kind
        after_s = retry_after_s(error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}))
        raise store_error(kind, f"{what} in parts: {code or error}. {remedy}".rstrip(), after_s) from error
    except HTTPClientError as error:
        raise StoreUnavailable(f"{what} in parts: {error}.") from error
    except BotoCoreError as error:
        raise StoreError(f"{what} in parts: {error}. Check the endpoint and the credentials.") from error
