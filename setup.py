"""What pyproject.toml cannot say: which modules the wheel holds once, and the git commit that it was built from.

Of the short names `executors` and `replica` the wheel holds `__init__.py` alone: their modules are in it once, below
`diloco_orchestrator` (links there lead to the same folders). `diloco_orchestrator/COMMIT` is written into wheel and
sdist, never into the checkout; an sdist has no git folder, so that a wheel made of it gets the sdist's file.
"""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

COMMIT = "diloco_orchestrator/COMMIT"


def write_commit(folder):
    """Write the commit of this checkout into a tree that is built; nothing where this is no checkout of git."""
    root = Path(__file__).parent
    if not (root / ".git").exists():
        return

    def git(*words):
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return
    (Path(folder) / COMMIT).write_text(f"{commit}{'+changes' if changed else ''}\n")


class BuildModulesOnce(build_py):
    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if package not in ("executors", "replica") or each[1] == "__init__"]

    def run(self):
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class SourceWithCommit(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(cmdclass={"build_py": BuildModulesOnce, "sdist": SourceWithCommit})
