"""Pipeline parallel training: a model cut by depth over ranks.

``schedules`` says who does what when, as data and without torch; ``Pipeline`` runs one on the ``PipelineStage`` of this
rank; ``split`` cuts a model into stages.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "Evaluation": "runtime",
    "Pipeline": "runtime",
    "PipelineStage": "stage",
    "Teams": "teams",
    "pop": "skip",
    "split": "cut",
    "stash": "skip",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Imported when first asked for: schedules need no torch."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"pycomm.pipeline.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'pycomm.pipeline' has no attribute {name!r}")
