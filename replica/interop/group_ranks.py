"""Ranks of a replica that its user starts, such as by torchrun: the processes of torch's default process group."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.launched import Launched, settings_sha256
from diloco_orchestrator.replica.attempt.attempt import Attempt
from diloco_orchestrator.replica.training.ranks import Ranks


def group_of_replica(replica_id: int) -> Any:
    """The processes of torch's default group as a gloo group, if they are ranks of one replica; None otherwise.

    They are if that group exists and all its processes have this `replica_id`; every process of it calls this. Raises
    `ConfigError` if only some have.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    ids: list[Any] = [None] * dist.get_world_size()
    group = dist.new_group(backend="gloo")  # objects in NCCL's need each process's current device, which may not be set
    dist.all_gather_object(ids, replica_id, group)
    if len(set(ids)) not in (1, len(ids)):
        raise ConfigError(
            f"the processes of torch's default group join as replicas {ids}: give all of them one replica_id, as ranks "
            "of one replica, or each its own. Replicas of several ranks need a torchrun for each."
        )
    return group if ids.count(replica_id) > 1 else None


def joined_in_group(
    group: Any,
    claimed: Callable[[], Attempt],
    adopted: Callable[[int, int, str, Launched], Attempt],
    timeout_s: float,
) -> tuple[Attempt, Ranks]:
    """The attempt of a replica whose ranks are the processes of torch's default group, and this process among them.

    Args:
        group: a result of `group_of_replica`.
        claimed: makes and claims the attempt; called in rank 0.
        adopted: makes the same attempt in another rank from its number, its leg, the digest of its claim, and the run's
            digests.
        timeout_s: limit of each collective operation among the ranks, in seconds.

    Raises the error of `claimed` in rank 0, and `ConfigError` with its words in the others.
    """
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            attempt = claimed()
            launched = Launched(attempt.log.run_sha256, settings_sha256(attempt.begin.settings))
            found = [(attempt.number, attempt.begin.leg, attempt.claim_sha256, launched)]
        except Exception as error:  # of any kind: the other ranks wait for the result
            dist.broadcast_object_list([f"{type(error).__name__}: {error}"], 0, group)
            raise
    dist.broadcast_object_list(found, 0, group)
    if dist.get_rank():
        if isinstance(found[0], str):
            raise ConfigError(f"rank 0 could not join: {found[0]}")
        attempt = adopted(*found[0])
    local_rank = int(os.environ.get("LOCAL_RANK") or dist.get_rank())
    host: list[Any] = [os.environ.get("MASTER_ADDR") or _own_address()]
    dist.broadcast_object_list(host, 0, group)
    ranks = Ranks.joined(local_rank, host[0], timeout_s, store=attempt.store, background=attempt.background)
    return replace(attempt, owners=ranks.owners), ranks


def _own_address() -> str:
    """The IPv4 address that DNS gives for this machine's host name; 127.0.0.1 if DNS has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
