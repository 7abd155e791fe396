"""ZeRO-1: each rank holds a shard of the optimizer state.

partition         partitioning of the parameters among the ranks
optimizer_state   hooks of an optimizer, which update this rank's shard and broadcast it
"""
