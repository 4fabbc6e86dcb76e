"""`python -m diloco_orchestrator.replica.testing.watched_rank`: one rank of a replica in a check, whose training is
watched.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from diloco_orchestrator.replica.process import rank
from diloco_orchestrator.replica.testing.attempt_server import WATCH


def load(entrypoint: str) -> Callable[[Any], None]:
    """The user's training function, watched as the variable `WATCH` of the environment says."""
    from diloco_orchestrator.replica.testing.watched import Watch, watched  # torch is imported by now

    return watched(Watch(**json.loads(os.environ[WATCH])))(entrypoint)


if __name__ == "__main__":
    code = rank.main(load)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
