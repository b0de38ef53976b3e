"""README's generated tables are those of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_generated_tables_are_up_to_date() -> None:
    command = [sys.executable, "tools/readme_tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + "run: python tools/readme_tables.py"
