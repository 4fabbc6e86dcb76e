"""A fresh process that measures its memory during rounds: `python memory_of_a_sync.py FOLDER MILLIONS [snapshots]`.

Prints JSON: `c`, the fp32 bytes of the trainable parameters, and in units of c the memory beyond model, gradients and
AdamW: `held` after each sync, `peak` during it. With `snapshots` each sync includes a snapshot; the replica, which is
alone, rebuilds its base before it writes one.
"""

import json
import sys
from pathlib import Path

import torch

from diloco_orchestrator import ObjectStoreManager, make_diloco_outer_loop

SYNCS = 3


def status(field: str) -> int:
    """Bytes, from /proc/self/status: VmRSS is the memory now, VmHWM its highest since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(folder: str, millions: int, snapshots: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, bias=False) for _ in range(millions)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    c, baseline = 4 * 10**6 * millions, status("VmRSS")
    manager = ObjectStoreManager.join(folder, 0, 1, rounds=SYNCS, snapshot_every=1 if snapshots else 10**6)
    held, peak = [], []
    with make_diloco_outer_loop(model, optimizer, manager, 1):
        for _ in range(SYNCS):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            optimizer.step()
            if snapshots:
                assert not manager.participant.write_snapshot_if_due()
                manager.participant._snapshots.wait()
            manager.participant._requests.payloads.wait()  # it goes to a file beside training
            held.append((status("VmRSS") - baseline) / c)
            peak.append((status("VmHWM") - baseline) / c)
    print(json.dumps({"c": c, "held": held, "peak": peak}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "snapshots" in sys.argv)
