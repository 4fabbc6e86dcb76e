"""`ObstoreEngine`: the store interface over obstore, for local folders, S3 and compatible servers, GCS and Azure.

Two tables translate its errors into ours, by which `store.retrying` retries. obstore's own retries are off, because a
retried create whose first reply was lost would report our own object as somebody else's.
"""

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, InvalidPathError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store, from_url

from diloco_orchestrator.errors import (
    ConfigError,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    unknown_name,
)
from diloco_orchestrator.store.base import OBJECT_LIMIT, ObjectInfo, Store
from diloco_orchestrator.store.local_files import is_on_local_disk, listed, open_regular
from diloco_orchestrator.store.s3_errors import BY_CODE, FOREIGN_404, NO_REASON, THROTTLED, store_error
from diloco_orchestrator.store.upload_limits import LEAST_S, OVER, UploadLimits

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

    from diloco_orchestrator.store.s3_multipart import MultipartUploads

# A file of 1 GiB over a slow line may take hours to read; an answer of which no byte comes for half a minute is lost.
# The latter counts from the beginning of a request, so requests that write much have limits of their own.
CLIENT_OPTIONS: "ClientConfig" = {"timeout": "6h", "read_timeout": "30s", "connect_timeout": "10s"}
NO_RETRIES: "RetryConfig" = {"max_retries": 0}

_THROTTLED_S = 30.0
_STREAMED, _CHUNK = 4 * 2**20, 2**18  # bytes

# Keys that are a file's path as they are; obstore escapes other characters.
_PLAIN = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*", re.ASCII)

# obstore's local engine writes files under names such as "name#1"; they remain if its process dies.
_STAGING = re.compile(r"#\d+$")

_NO_RANGE = re.compile(r"\b416\b|range", re.IGNORECASE)

# The error code in a server's reply: <Code>NoSuchBucket</Code> in its XML.
_CODE = re.compile(r"(?:<Code>|\(code: )(\w+)")
# S3, GCS and Azure, and servers like them, say by a code what a 404 is about. A page or a sentence is somebody else's.
_FOREIGN = re.compile(r"404 Not Found: +(?!.*<Code>)\S", re.DOTALL)
# obstore sends a space as "+" and "~" as "%7E" in a query. S3 signs what that decodes to; moto's server does not.
_RAW_QUERY = (
    "this server signs a listing's query as it was sent, which S3 does not: name the folder with letters, digits, '.', "
    "'_' and '-' alone, or use fsspec+s3://."
)
_NO_CREDENTIALS = (
    "There are no credentials in the environment, and this machine has none of its own: set "
    "GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_KEY; to read a public bucket, "
    "GOOGLE_SKIP_SIGNATURE=true or AZURE_SKIP_SIGNATURE=true."
)
# Why a request did not reach a server, by names in the part of obstore's errors that is for programmers.
_BY_SOURCE: tuple[tuple[str, type[StoreError], str], ...] = (
    (
        r"InvalidCertificate",
        StoreDenied,
        "The server's certificate is for another name, has ended, or is signed by nobody whom this machine trusts: "
        "name a file with the certificates of a company, or of a server of your own, in SSL_CERT_FILE.",
    ),
    (r"InvalidMessage|InvalidContentType", StoreDenied, "The server speaks no TLS there: is its address http://?"),
    (r'"dns error"', StoreUnavailable, "The server's name is not known: check the endpoint, and this machine's DNS."),
    (r"kind: ConnectionRefused", StoreUnavailable, "Nobody listens there: see endpoint, port, server and HTTPS_PROXY."),
    (r"Connect,.*TimedOut", StoreUnavailable, "Nothing answers there: see network, endpoint and HTTPS_PROXY."),
    (r"source: TimedOut", StoreUnavailable, OVER),
    (r"kind: TimedOut", StoreUnavailable, "The other side took no more bytes."),
    (r"kind: ConnectionReset|IncompleteMessage", StoreUnavailable, "The server ended the connection."),
)
# For errors without a code; the first match decides. obstore's operating-system errors differ only in their text.
_BY_TEXT: tuple[tuple[str, type[StoreError], str], ...] = (
    (r"os error 28\b|No space left|os error 122\b|507 Insufficient", StoreFull, "Free some space there."),
    (r"os error 30\b", StoreFull, "The file system is read-only: see why (dmesg), and mount it for writing again."),
    (r"os error 13\b|Permission denied", StoreDenied, "Check what this user may do there."),
    # A disk or a file server that fails for a moment: EIO, and ESTALE of NFS.
    (r"(os error|Errno) (5|116)\b", StoreUnavailable, "The disk or its file server fails: see dmesg."),
    # The last source of credentials is the service of the machine itself, which only a cloud's machines have.
    (r"token request.*(169\.254\.169\.254|metadata\.google).* status code: 4", StoreDenied, _NO_CREDENTIALS),
    (r"token request.*(169\.254\.169\.254|metadata\.google)", StoreUnavailable, _NO_CREDENTIALS),
    (r"performing HEAD .* 400 Bad Request", StoreDenied, NO_REASON),
    (r"status code: 40[13]\b", StoreDenied, "Check the credentials and what they allow."),  # of a listing
    # Every write to such a bucket needs a checksum; obstore sends none, because some servers know none.
    (r"Object ?Lock", StoreError, "The bucket has a default retention: use one without, or fsspec+s3://."),
    (r"builder error", StoreError, "Check the endpoint: it must be an http:// or https:// address."),
    (r"301 Moved|redirect", StoreError, "The bucket lies in another region: set AWS_REGION to it."),
    (r"code: 429 ", StoreUnavailable, THROTTLED),
    (r"code: 5\d\d |timed? ?out|connect|dns|error sending request|HTTP error", StoreUnavailable, ""),
)

# Failures of boto3 to fetch credentials that pass by themselves. obstore reports every failure of a credential provider
# as refused credentials, which would be permanent.
_CREDENTIALS_LATER = re.compile(
    r"credential provider: (\w*(Connect|Timeout|ConnectionClosed|HTTPClient|SSL)\w*Error|MetadataRetrievalError)"
    r"|\((Throttling\w*|RequestLimitExceeded|InternalFailure|InternalError|ServiceUnavailable|IDPCommunicationError)\)"
)


# Options of obstore's stores; those of its HTTP client are set here.
_GCS_OPTIONS = (
    *("service_account", "service_account_key", "application_credentials", "base_url", "bearer_token"),
    "skip_signature",
)
_AZURE_OPTIONS = (
    *("account_name", "account_key", "sas_key", "token", "client_id", "client_secret", "tenant_id", "authority_host"),
    *("endpoint", "use_emulator", "use_fabric_endpoint", "msi_endpoint", "object_id", "msi_resource_id"),
    *("federated_token_file", "use_azure_cli", "skip_signature"),
)

# Options that say where a container or bucket is, with the environment variables that obstore reads for them.
_GCS_PLACE = {"base_url": "GOOGLE_BASE_URL"}
_AZURE_PLACE = {"account_name": "AZURE_STORAGE_ACCOUNT_NAME", "endpoint": "AZURE_STORAGE_ENDPOINT"}


_UNSENDABLE = re.compile(r"""[^!-~]|["<>\\^`{|}]""")  # in an address


def without_user(text: str) -> str:
    """`text` without user names and passwords of addresses in it."""
    return re.sub(r"//[^/\s]*@", "//…@", text)


def checked_endpoint(endpoint: str, names: str) -> str:
    """The address of a server, as it was given.

    Raises `ConfigError` for what is none: obstore ends the process's thread there. `names`: where one is set.
    """
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number up to 65535, half an IPv6 address
        is_address = False
    if not is_address or _UNSENDABLE.search(endpoint):
        raise ConfigError(
            f"the endpoint {without_user(endpoint)!r} is no address of a server. Write http://host:port or "
            f"https://host, without spaces or quotation marks: {names}."
        )
    return endpoint


def check_certificates() -> None:
    """Raise `ConfigError` if the file of trusted certificates that the environment names is not there.

    obstore passes over it, so that a server would be called unknown that the file names; boto3 fails.
    """
    if (named := os.environ.get("SSL_CERT_FILE")) and not Path(named).is_file():
        raise ConfigError(
            f"SSL_CERT_FILE names {named}, which is no file. Name the file with the certificates to trust (PEM), or "
            "unset it: then those of this machine are trusted."
        )


def writing_options(limit_s: float) -> "ClientConfig":
    """Options of an HTTP client whose requests write, and may take `limit_s` seconds."""
    return {**CLIENT_OPTIONS, "timeout": f"{limit_s:.0f}s", "read_timeout": f"{limit_s:.0f}s"}


class ObstoreEngine(Store):
    """The store interface over any obstore store.

    `multipart`: writes the objects above `single_put_limit` bytes. Without it every object is written in one request,
    which a folder and GCS accept at any size, Azure up to 5,000 MiB. `gives_files`: whether a folder's objects may be
    mapped into memory. `endpoint`: URL of the server, empty for the vendor's own. `writes`: the same store with the
    credentials that write, where those of `store` read alone. `writer`: makes such a store with the given options of
    its HTTP client; None for a folder.
    """

    def __init__(
        self,
        store: "ObjectStore",
        url: str,
        multipart: "MultipartUploads | None" = None,
        single_put_limit: int = OBJECT_LIMIT,
        gives_files: bool = False,
        endpoint: str = "",
        writes: "ObjectStore | None" = None,
        writer: "Callable[[ClientConfig], ObjectStore] | None" = None,
        allowed: int | None = None,
    ) -> None:
        self._store = store
        self._writes = writes or store
        self._writer = writer
        self._writers = {LEAST_S: self._writes}  # by the limit of a request, in seconds
        self._limits = UploadLimits()
        self._gives_files = gives_files
        self.url = url
        self._endpoint = endpoint
        self._allowed = allowed
        self._multipart = multipart
        self._single_put_limit = single_put_limit

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def requests_allowed(self) -> int | None:
        return self._allowed

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= start:
            return b""
        with self._translating("read", key):
            return self._range(key, start, end)

    def open_file(self, key: str) -> IO[bytes] | None:
        """The object as an open file. None for a cloud store, and for a folder on a network file system.

        Raises `ObjectMissing` if it does not exist.
        """
        if not self._gives_files or not _PLAIN.fullmatch(key):
            return None
        with self._translating("read", key):
            return open_regular(Path(self.url) / key)

    def _range(self, key: str, start: int, end: int | None) -> bytes:
        """Bytes [start, end) of an object, fewer if it ends earlier, in one GET: HEAD gives no error code."""
        if isinstance(self._store, LocalStore) and _PLAIN.fullmatch(key):
            # Twice as fast as through obstore, which holds the file a second time while a thread copies it.
            with open_regular(Path(self.url) / key) as file:
                return _read(file, start, end)
        wanted: Any = {"range": (start, end)} if end is not None else {"range": {"offset": start}} if start else {}
        try:
            found = obstore.get(self._store, key, options=wanted)
        except FileNotFoundError:
            raise
        except Exception as error:  # of any kind: servers and folders refuse a range that begins at an object's end.
            if not wanted or not _NO_RANGE.search(str(error)) or obstore.head(self._store, key)["size"] > start:
                raise
            return b""
        if found.meta["size"] < _STREAMED or isinstance(self._store, LocalStore):
            return bytes(found.bytes())
        # `bytes()` would copy the object once it is there; here its parts are copied while others still arrive.
        whole = io.BytesIO()
        for chunk in found.stream(min_chunk_size=_CHUNK):
            whole.write(chunk)
        return whole.getvalue()

    def put(self, key: str, data: bytes) -> None:
        if self._multipart is not None and len(data) > self._single_put_limit:
            return self._multipart.put(key, data)
        with self._translating("write", key), self._writing(len(data)) as store:
            obstore.put(store, key, data, use_multipart=False)

    def create(self, key: str, data: bytes) -> bool:
        if self._multipart is not None and len(data) > self._single_put_limit:
            return self._multipart.create(key, data)
        with self._translating("create", key):
            try:
                with self._writing(len(data)) as store:
                    # obstore's own multipart uploads have no create-only mode.
                    obstore.put(store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if (code := _CODE.search(str(error))) and BY_CODE.get(code[1], (None,))[0] is StoreUnavailable:
                    raise  # a 409: perhaps no object exists yet
                return False
        return True

    @contextmanager
    def _writing(self, size: int) -> Iterator["ObjectStore"]:
        """Context around a request that writes `size` bytes; gives the store whose client waits long enough for it."""
        if self._writer is None:
            yield self._writes
            return
        with self._limits.timed(size) as limit_s:
            if limit_s not in self._writers:
                self._writers[limit_s] = self._writer(writing_options(limit_s))
            yield self._writers[limit_s]

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        with self._translating("list", prefix):
            try:
                found = obstore.list(self._store, prefix or None, offset=start_after or None).collect()
                infos = [ObjectInfo(meta["path"], meta["size"]) for meta in found]
            except InvalidPathError:  # a file of somebody else, whose name is no key; without it there are the others
                infos = listed(Path(self.url), prefix, start_after)
        # Azurite ignores where a listing should begin. obstore's local engine lists in directory order and shows its
        # staging files.
        wanted = [info for info in infos if info.key > start_after and not _STAGING.search(info.key)]
        return iter(sorted(wanted, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        with suppress(ObjectMissing), self._translating("delete", key):
            obstore.delete(self._writes, key)

    def readable_url(self, key: str, lifetime_s: float) -> str:
        """A presigned URL for GET; the file's path if the store is a folder. Raises `StoreError` if signing fails."""
        if isinstance(self._store, LocalStore):
            return str(Path(self.url) / key)
        assert isinstance(self._store, S3Store | GCSStore | AzureStore)
        with self._translating("sign", key):
            return obstore.sign(self._store, "GET", key, expires_in=timedelta(seconds=lifetime_s))

    @contextmanager
    def _translating(self, verb: str, key: str) -> Iterator[None]:
        """Context that turns errors of obstore or of the file system into `StoreError`. `verb`: for messages."""
        try:
            yield
        except Exception as error:  # its kinds share no base; servers' other replies come as plain ones
            raise self._translated(error, key, verb) from error

    def _translated(self, error: Exception, key: str, verb: str) -> StoreError:
        text, _, source = str(error).partition("\n\nDebug source")
        text = text.strip()
        code = _CODE.search(text)
        if _FOREIGN.search(text):
            return StoreUnavailable(f"cannot {verb} {key or 'the folder'} in {self.url}: {FOREIGN_404}")
        # A folder's object may be a file where another key needs a folder: nothing lies below it.
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if missing and not (code and code[1] in ("NoSuchBucket", "ContainerNotFound")):
            if verb not in ("create", "write"):
                return ObjectMissing(f"{key} does not exist in {self.url}.")
            return StoreError(
                f"cannot {verb} {key} in {self.url}: not found. Check the bucket's name and the endpoint."
            )
        what = f"cannot {verb} {key or 'the folder'} in {self.url}: {code[1] if code else _first_line(text)}."
        if code and code[1] in BY_CODE:
            kind, remedy = BY_CODE[code[1]]
            if (
                verb == "list"
                and code[1] == "SignatureDoesNotMatch"
                and not _PLAIN.fullmatch(f"{self.url.partition('://')[2]}/{key}x")
            ):
                remedy = f"{remedy[:-1]}, or {_RAW_QUERY}"
            return store_error(kind, f"{what} {remedy}", self._after_s(remedy))
        if _CREDENTIALS_LATER.search(text):
            return StoreUnavailable(f"{what} The service that gives out credentials cannot be reached.")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return StoreDenied(f"{what} Check the credentials and what they allow.")
        for pattern, kind, remedy in _BY_SOURCE:
            if "token request" not in text and re.search(pattern, source, re.DOTALL):
                return kind(f"{what} {remedy}")
        for pattern, kind, remedy in _BY_TEXT:
            if re.search(pattern, text, re.IGNORECASE):
                return store_error(kind, f"{what} {remedy}".rstrip(), self._after_s(remedy))
        return StoreError(what)

    def _after_s(self, remedy: str) -> float:
        """Seconds until the store may be asked again. obstore shows no header of a reply, so that Retry-After is lost.

        A tenth of the five minutes of a stated limit once that is used up; else 0.
        """
        return _THROTTLED_S if self._allowed is not None and remedy == THROTTLED else 0.0


def _read(file: IO[bytes], start: int, end: int | None) -> bytes:
    """Bytes [start, end) of a file; fewer if the file is shorter."""
    size = os.fstat(file.fileno()).st_size
    file.seek(start)
    return file.read(max(0, (size if end is None else min(end, size)) - start))


def _first_line(text: str) -> str:
    return text.splitlines()[0].rstrip(".") if text else "no reason given"


def open_local(path: Path) -> ObstoreEngine:
    """The store in the folder `path`, which is created if it does not exist. Raises `StoreDenied` if that fails."""
    try:
        store = LocalStore(path, mkdir=True)
        return ObstoreEngine(store, str(path), gives_files=is_on_local_disk(path))
    except Exception as error:  # obstore's kinds share no base
        text = str(error).split("\n\nDebug source", 1)[0].strip()
        text = next((f"{each} is a file" for each in (path, *path.parents) if each.is_file()), text)
        raise StoreDenied(
            f"cannot open the folder {path} as a store: {text}. Choose a folder that you may write."
        ) from error


def open_cloud(url: str, options: Mapping[str, Any]) -> ObstoreEngine:
    """The store at `gs://…` or `az://…`.

    `options`: obstore's own settings; missing ones come from the environment. Raises `ConfigError` if URL, credentials
    or options are invalid, or the file that SSL_CERT_FILE names is missing.
    """
    kind, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{url} names no bucket. Write {kind}://bucket/folder.")
    allowed = _GCS_OPTIONS if kind == "gs" else _AZURE_OPTIONS
    for name in options:  # obstore ends the process's thread at a client's option among them
        if name not in allowed:
            raise ConfigError(unknown_name("storage option", name, allowed))
    check_certificates()
    if kind == "az" and (server := options.get("endpoint") or os.environ.get("AZURE_STORAGE_ENDPOINT")):
        checked_endpoint(str(server), "AZURE_STORAGE_ENDPOINT, or storage_options")
    # A server on loopback or behind a proxy may speak http, as with S3: no endpoint does that nobody has named.
    more: ClientConfig = {"allow_http": True}
    if kind == "gs" and (payer := os.environ.get("GOOGLE_CLOUD_QUOTA_PROJECT")):  # as in Google's own clients
        more["default_headers"] = {"x-goog-user-project": payer}

    def opened(client: "ClientConfig") -> "ObjectStore":
        given: Any = {"client_options": {**client, **more}, "retry_config": NO_RETRIES, **options}
        if "@" in bucket:
            return from_url(url, **given)
        if kind == "gs":  # with the path as it is: `from_url` reads %20 as a space, S3 does not
            return GCSStore(bucket, prefix=prefix.strip("/") or None, **given)
        return AzureStore(bucket, prefix=prefix.strip("/") or None, **given)

    try:
        store = opened(CLIENT_OPTIONS)
    except Exception as error:  # obstore's kinds share no base; options of other types raise others
        text = str(error).split("\n\nDebug source", 1)[0].strip()
        remedy = "Check the URL, the credentials and storage_options."
        if "Account must be specified" in text:
            remedy = "Set AZURE_STORAGE_ACCOUNT_NAME, or write abfss://container@account.dfs.core.windows.net/folder."
        raise ConfigError(f"cannot open {url}: {text}. {remedy}") from error
    return ObstoreEngine(store, url, endpoint=_endpoint(kind, options), writer=opened)


def _endpoint(kind: str, options: Mapping[str, Any]) -> str:
    """Azure's account and server, or the server of GCS, that options or environment name; empty if neither does."""
    names = _GCS_PLACE if kind == "gs" else _AZURE_PLACE
    found = [str(options.get(name) or os.environ.get(variable, "")) for name, variable in names.items()]
    return " ".join(filter(None, found))
