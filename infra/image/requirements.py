"""Prints what a replica needs installed, one requirement per line: our dependencies and those of the extra `s3`.

For the Dockerfile beside it; pyproject.toml, given by its path, is the only place that lists them.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["s3"], sep="\n")
