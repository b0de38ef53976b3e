"""``python -m pycomm.bench``: what a collective takes with several backends side by side, checked element by element.

The names are those of nccl-tests. The size is that of the whole array: what an all_gather, gather or all_to_all ends
with on one rank, what a reduce_scatter or scatter begins with. ``algbw`` is size / time; ``busbw`` is ``algbw`` times a
factor that makes it comparable with a link's speed whatever the number of ranks n is, namely the part of the size that
must enter or leave each rank (see operations.py). Sizes are powers of 1024, GB/s are 1e9 bytes per second, times are
microseconds of the slowest rank.
"""
