"""`RecentPayloads`: verified payload bytes of the open round and of the round before, for averaging and re-uploads.

`replica.rounds.reupload` uploads payload shards again that other replicas cannot read.
"""

import logging
from concurrent.futures import Future
from typing import IO

from diloco_orchestrator.allreduce.payload_cache import Name, PayloadCache
from diloco_orchestrator.clock import Background
from diloco_orchestrator.errors import DilocoError
from diloco_orchestrator.protocol.digests import bulk_digest

log = logging.getLogger(__name__)

_WORTH_A_FILE = 16 * 2**20  # bytes in memory; fewer stay there


class RecentPayloads:
    """Two caches of payload bytes: those put since the last `end_round`, and those of the round before. Thread-safe.

    If more than 16 MiB of the round before are in memory they are moved to the cache's file, beside training, so that
    memory is needed for one round only; the file takes disk space for one more.
    """

    def __init__(self) -> None:
        self._open, self._before = PayloadCache(), PayloadCache()
        self._moving: Future[None] | None = None

    def put(self, name: Name, data: bytes | memoryview) -> None:
        """Keep payload bytes of the open round under `name`, unless the name is there."""
        self._open.put(name, data)

    def put_file(self, name: Name, file: IO[bytes], size: int) -> None:
        """Keep the payload shard in a local file of the store under `name`, in place of a copy of its bytes.

        The shard is of the open round, and the caller has verified it (`open_verified`). `size`: of the file in bytes.
        From this call on the cache owns the open file and closes it.
        """
        self._open.put_file(name, file, size)

    def get(self, name: Name) -> bytes | memoryview | None:
        """The payload bytes of the open round kept under `name`; None if there are none."""
        return self._open.get(name)

    def __contains__(self, name: Name) -> bool:
        return name in self._open

    def held(self, key: str) -> bytes | memoryview | None:
        """The bytes of the payload shard at `key`, of the open round or the one before; None if this process has none.

        They are verified once more: a mapped file of the store may itself be the damaged object that is to be replaced.
        """
        for cache in (self._open, self._before):
            for name in cache.names():
                data = cache.get(name) if name[0] == key else None
                if data is not None and bulk_digest(data) == name[1]:
                    return data
        return None

    def end_round(self, background: Background) -> None:
        """Drop the bytes of the round before and keep those of the open one, if it had any, in their place."""
        self.wait()
        if not self._open.names():
            return
        self._before.clear()
        self._open, self._before = self._before, self._open
        if self._before.memory_bytes > _WORTH_A_FILE:
            self._moving = background.start(self._move_to_file)

    def wait(self) -> None:
        """Block until the bytes of the round before have been moved to the file."""
        if self._moving is not None:
            self._moving.result()
            self._moving = None

    def _move_to_file(self) -> None:
        cache = self._before
        try:
            cache.spill()
        except (OSError, DilocoError) as error:
            cache.clear()
            log.warning("payloads of the last round are not kept for other replicas: %s", error)
