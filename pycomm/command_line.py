"""What commands of this package share: bad arguments end them with one line and status 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from pycomm.errors import InvalidArgument


class Parser(argparse.ArgumentParser):
    """Which refuses in one line, in the name of ``python -m NAME``."""

    def error(self, message: str) -> NoReturn:
        """See ArgumentParser."""
        name = self.prog.removeprefix("python -m ").split()[0]
        self.exit(2, f"{name}: {message}\n")


def run_command(parser: Parser, work: Callable[[], object]) -> int:
    """Does the work; returns 0, or ends with status 2 and the parser's words for what its arguments made impossible."""
    try:
        work()
    except InvalidArgument as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename} cannot be written: {error.strerror}")
    except ModuleNotFoundError as error:
        parser.error(f"--plot needs {error.name}: pip install {error.name}")
    return 0
