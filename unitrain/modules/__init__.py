"""Changes to the user's modules, in place.

sync_batch_norm           BatchNorm over the samples of all ranks
differentiable_allgather  an allgather with a gradient, for losses over the samples of all ranks
activation_checkpointing  blocks that repeat their forward in the backward, to save memory
buffers                   buffers equal to rank 0's
acceleration              torch.compile, and the channels-last memory format
"""
