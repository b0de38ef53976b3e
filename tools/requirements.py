"""Prints the requirements of pyproject.toml's optional groups, for pip: ``requirements.py demo test``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(groups: list[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = {item for group in groups for item in project["optional-dependencies"][group]}
    print(" ".join(sorted(wanted)))


if __name__ == "__main__":
    main(sys.argv[1:])
