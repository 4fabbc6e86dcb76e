"""An executor of your own: replicas in a container, on a queue, by ssh. Here: local processes at a lower priority.

Only `launch` and its plan differ from `LocalProcessExecutor`, so they are all that is written.

    python examples/custom_executor.py
"""

import os
import tempfile
from contextlib import suppress
from dataclasses import replace

from diloco_orchestrator import LocalProcessExecutor, launch


class NiceProcesses(LocalProcessExecutor):
    """Runs every replica under `nice`."""

    name = "nice"  # in intents: who attaches later must bring this executor

    def __init__(self, priority=10, directory=None):
        super().__init__(directory)
        self._priority = priority

    def plan(self, request):
        return super().plan(self._nicer(request))

    def launch(self, request):
        return super().launch(self._nicer(request))

    def _nicer(self, request):
        code = f"import os, sys; os.nice({self._priority}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        return replace(request, command=["python", "-c", code, *request.command[1:]])


if __name__ == "__main__":
    executor = NiceProcesses(directory=tempfile.mkdtemp())
    settings = {"replicas": 2, "rounds": 3, "sync_every": 5, "args": {"lr": 3e-3}}
    run = launch("plain_loop:train", store=tempfile.mkdtemp() + "/run", executor=executor, **settings)
    seen = {}

    def look():
        for handle in executor.find(run.status().run_id):
            with suppress(ProcessLookupError):  # it has ended
                seen[handle.replica_id] = os.getpriority(os.PRIO_PROCESS, handle.native["pid"])

    result = run.wait(on_poll=look)
    print(f"{result.status}; replicas ran at priorities {sorted(seen.values())}")
