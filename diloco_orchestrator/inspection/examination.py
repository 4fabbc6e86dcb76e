"""`python -m diloco_orchestrator.inspection.examination --store URL`: examines the machine that a replica would have.

`diloco doctor --executor … URL` launches it with image, machine, code and secrets of a replica. It prints each finding,
and all of them as JSON in its exit line, which the provider's log has even if the bucket cannot be reached.
"""

import argparse
import json

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.inspection.doctor import Finding, examine, examine_store
from diloco_orchestrator.protocol.process import ENV_STORAGE_OPTIONS, EXIT_DONE, print_exit_line, unpacked_code
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.replica.process.run_attempt import process_environment


def main() -> None:
    """Examine this machine and the store; print each finding, and all of them in the exit line."""
    parser = argparse.ArgumentParser(prog="python -m diloco_orchestrator.inspection.examination")
    parser.add_argument("--store", required=True, help="a folder of the bucket")
    parser.add_argument("--gpu-wanted", action="store_true", help="a machine without a usable GPU is not ok")
    given = parser.parse_args()
    clock, environ = SystemClock(), process_environment()
    found: list[Finding] = []
    options = json.loads(environ.get(ENV_STORAGE_OPTIONS) or "{}")
    for checks in (examine(None, clock, gpu_wanted=given.gpu_wanted), examine_store(given.store, clock, options)):
        for finding in checks:
            found.append(finding)
            print(redact(f"{'ok' if finding.ok else 'FAIL'}: {finding.name}: {finding.detail}", environ), flush=True)
    body = json.loads(redact(json.dumps([each.to_json() for each in found]), environ))
    print_exit_line(EXIT_DONE, value={"findings": body, "at": clock.wall_time()})


if __name__ == "__main__":
    with unpacked_code():
        main()
