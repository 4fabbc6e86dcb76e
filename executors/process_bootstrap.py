"""The process side of the low-level form: calls the entrypoint and tells how it ended.

Travels as text (`python -c`), so it needs nothing but the standard library. Reads the environment that
`low_level_requests` wrote; the last line of output is `DILOCO_EXIT {json}`, which any executor can find in its vendor's
log.
"""

import base64
import importlib
import io
import json
import os
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from typing import Any

EXIT_LINE = "DILOCO_EXIT "
ENV_ENTRYPOINT = "DILOCO_ENTRYPOINT"
ENV_ARGS = "DILOCO_ENTRYPOINT_ARGS"
ENV_CODE = "DILOCO_ENTRYPOINT_CODE"  # a zip in base64

EXIT_DONE, EXIT_ERROR, EXIT_PERMANENT = 0, 1, 78  # as in executors.contract, which is not there


def load_entrypoint(entrypoint: str) -> Callable[..., Any]:
    """The function that "package.module:function" names. Raises ImportError or TypeError saying what is wrong."""
    module_name, _, path = entrypoint.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ImportError(f"{module_name} has no {path!r}. Check the entrypoint {entrypoint!r}.")
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{entrypoint!r} is a {type(found).__name__}, which cannot be called. Name a function.")
    return found  # type: ignore[no-any-return]


def print_exit_line(code: int, **fields: Any) -> None:
    """The last line of a process's output."""
    try:
        line = json.dumps({"code": code, **fields})
    except (TypeError, ValueError):
        fields["value"] = None  # what the entrypoint returned is not JSON; only its success can be told
        line = json.dumps({"code": code, **fields})
    sys.stdout.flush()
    sys.stderr.flush()
    print(f"\n{EXIT_LINE}{line}", flush=True)


def main() -> int:
    """Run the entrypoint; the exit code is also in the exit line."""
    entrypoint = os.environ[ENV_ENTRYPOINT]
    args = json.loads(os.environ.get(ENV_ARGS) or "{}")
    try:
        if packed := os.environ.get(ENV_CODE):
            folder = tempfile.mkdtemp(prefix="diloco-code-")
            zipfile.ZipFile(io.BytesIO(base64.b64decode(packed))).extractall(folder)
            sys.path.insert(0, folder)
        function = load_entrypoint(entrypoint)
    except Exception as error:
        trace = traceback.format_exc()
        print_exit_line(EXIT_PERMANENT, error=f"{entrypoint} does not load: {error}", traceback=trace)
        return EXIT_PERMANENT
    try:
        value = function(**args)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        print_exit_line(code, error="" if code == 0 else f"the entrypoint exited: {leaving.code}")
        return code
    except BaseException as error:
        print_exit_line(EXIT_ERROR, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        return EXIT_ERROR
    print_exit_line(EXIT_DONE, value=value)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
