"""Copies the shipped files into the wheel; everything else about the package is in pyproject.toml."""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).resolve().parent
sys.path.insert(0, str(SOURCE / "src"))  # the package itself, which is not installed while it is built

from classroom_rl.system.shipped import FOLDERS  # noqa: E402


class BuildWithShippedFiles(build_py):
    """The package with a copy of its YAML, templates and data, so that it works without a checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout's own are found
            return
        for name in FOLDERS:
            target = Path(self.build_lib) / "classroom_rl" / "shipped" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(SOURCE / name, target, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithShippedFiles})
