"""`python busy.py 4 COMMAND …`: runs a command beside so many busy loops, which end with it, however it ends.

For `make test-loaded`: a verdict that such loops change hangs on the wall clock.
"""

import ctypes
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_LOOP = "while True: pass"


def main() -> int:
    loops, command = int(sys.argv[1]), sys.argv[2:]
    started = [subprocess.Popen([sys.executable, "-c", _LOOP], preexec_fn=_die_with_parent) for _ in range(loops)]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for loop in started:
            loop.kill()
            loop.wait()


def _die_with_parent() -> None:
    """Linux ends the loops even where this process is killed before it can."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
