"""Gradients that are reduced over ranks when `backward` returns.

reference         the contract in a few lines: an allreduce of every gradient after the backward
ddp_wrapper       the fast path: DistributedDataParallel with corrections
reducer_group     the process group in which DDP's reducer communicates
end_of_backward   the steps at the end of a backward, and their order
unused_parameters the check of the first backward for parameters without a gradient
local_gradients   tracking of gradients that are not reduced, checked before each optimizer step
forward_buffers   buffers equal to rank 0's during training
compression       half-precision and PowerSGD compression of buckets
power_sgd         PowerSGD and its state
"""
