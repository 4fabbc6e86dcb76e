"""Prints the packages that a replica's image needs, one per line: our dependencies and those of the extra `s3`.

The Dockerfile beside it runs it with the path of pyproject.toml, the only place that lists them.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["s3"], sep="\n")
