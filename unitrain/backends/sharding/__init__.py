"""Sharding: each rank holds a part of the state of an optimizer.

partition         which elements of which parameters each rank updates
optimizer_state   an optimizer that updates this rank's part, and broadcasts it
"""
