"""Functions that change the user's modules in place.

sync_batch_norm           BatchNorm over the samples of all ranks
differentiable_allgather  a differentiable allgather, for losses over the samples of all ranks
activation_checkpointing  recomputation of activations in the backward pass, to save memory
buffers                   broadcast and loading of buffers
run_time_classes          classes that replace a module's forward
acceleration              torch.compile and the channels-last memory format
"""
