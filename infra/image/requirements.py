"""Prints the packages that a replica's image needs, one per line: our dependencies, torch, and those of the extra `s3`.

The Dockerfile beside it runs it with the path of pyproject.toml, the only place that lists them.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *extras["train"], *extras["s3"], sep="\n")
