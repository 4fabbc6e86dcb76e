"""What pyproject.toml cannot say: of the short names `executors` and `replica` the wheel holds `__init__.py` alone.

Their modules are in it once, below `diloco_orchestrator` (links there lead to the same folders).
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildModulesOnce(build_py):
    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if package not in ("executors", "replica") or each[1] == "__init__"]


setup(cmdclass={"build_py": BuildModulesOnce})
