"""A rank's process without torch and store, for the processes above it: does what the word after --do says of it.

Rank 0 ends at SIGTERM as a preempted one does, and by that all others. "die": SIGKILL of itself, once all are ready.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path)
parser.add_argument("--do", default="{}")  # JSON: a word by number of the rank
parser.add_argument("--place")
options = parser.parse_args()
place = json.loads(options.place)
events = os.fdopen(place["events"], "w", buffering=1)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append("leave"))
signal.signal(signal.SIGUSR2, lambda *_: print("my stacks", flush=True))


def end(code: int, reason: str) -> None:
    print(json.dumps({"ending": {"code": code, "reason": reason, "error": None}}), file=events)
    os._exit(code)


said = [f"{name}={os.environ.get(name)}" for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "DILOCO_MEETING_KEY")]
print(*said, "own group" if os.getpgrp() == os.getpid() else "group of others")
print(json.dumps({"pulse": {"round": 7 + place["rank"], "vacated": False}}), file=events, flush=True)
(options.folder / f"ready-{place['rank']}").touch()
do = json.loads(options.do).get(str(place["rank"]), "")
while True:
    if len(list(options.folder.glob("ready-*"))) == place["ranks"]:
        if do == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "end" or told:
            (options.folder / "ended").write_text("75 preempted" if told else "0 done")
        if (options.folder / "ended").exists() and (said := (options.folder / "ended").read_text()):
            code, _, reason = said.partition(" ")
            end(int(code), reason)
    print(json.dumps({"pulse": {"round": 7 + place["rank"], "vacated": False}}), file=events, flush=True)
    time.sleep(0.01)
