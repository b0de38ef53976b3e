"""Layers split over ranks."""

from pycomm.tensor_parallel.regions import (
    all_gather,
    copy,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = ["all_gather", "copy", "gather", "reduce", "reduce_scatter", "scatter"]
