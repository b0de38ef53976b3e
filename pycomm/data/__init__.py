"""Samples for every rank: ``ShardedSampler``, ``BalancedBatchSampler``, ``loader`` for a DataLoader with workers."""

from pycomm.data.agreement import speeds_of_ranks
from pycomm.data.loader import loader
from pycomm.data.sampler import BalancedBatchSampler, ShardedSampler

__all__ = ["BalancedBatchSampler", "ShardedSampler", "loader", "speeds_of_ranks"]
