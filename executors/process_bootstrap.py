"""The process that `launch_replicas` starts: calls the entrypoint and prints its result or error.

This file is sent as source text (`program_text`), so it needs only the standard library. It reads the environment that
`launch_replicas` sets. The last line of output is the exit line, which any executor finds in its provider's log.
"""

import base64
import io
import json
import os
import sys
import tempfile
import traceback
import zipfile

from diloco_orchestrator.executors.process_contract import (
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_PERMANENT,
    load_entrypoint,
    print_exit_line,
)

ENV_ENTRYPOINT = "DILOCO_ENTRYPOINT"
ENV_ARGS = "DILOCO_ENTRYPOINT_ARGS"  # JSON
ENV_CODE = "DILOCO_ENTRYPOINT_CODE"  # a zip in base64


def main() -> int:
    """Run the entrypoint that the environment names, and print the exit line. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="diloco-code-", ignore_cleanup_errors=True) as folder:
        return _run(folder)


def _run(folder: str) -> int:
    entrypoint = os.environ[ENV_ENTRYPOINT]
    args = json.loads(os.environ.get(ENV_ARGS) or "{}")
    try:
        if packed := os.environ.get(ENV_CODE):
            zipfile.ZipFile(io.BytesIO(base64.b64decode(packed))).extractall(folder)
            sys.path.insert(0, folder)
        function = load_entrypoint(entrypoint)
    except Exception as error:  # the user's module runs here, and may raise anything
        trace = traceback.format_exc()
        print_exit_line(EXIT_PERMANENT, error=f"{entrypoint} does not load: {error}", traceback=trace)
        return EXIT_PERMANENT
    try:
        value = function(**args)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        print_exit_line(code, error="" if code == 0 else f"the entrypoint exited: {leaving.code}")
        return code
    except BaseException as error:  # the user's function: whatever it raises is how this process ends
        print_exit_line(EXIT_ERROR, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        return EXIT_ERROR
    print_exit_line(EXIT_DONE, value=value)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
