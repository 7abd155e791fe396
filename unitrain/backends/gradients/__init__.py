"""Gradient reduction over ranks, complete when `backward` returns.

reference         reference implementation: one allreduce per gradient after the backward pass
ddp_wrapper       the fast path: DistributedDataParallel with corrections
reducer_group     the process group in which DDP's reducer communicates
end_of_backward   the steps at the end of a backward pass, and their order
unused_parameters the check of the first backward pass for parameters without a gradient
local_gradients   tracking of gradients that are not reduced, checked before each optimizer step
forward_buffers   buffers equal to rank 0's during training
compression       half-precision and PowerSGD compression of buckets
power_sgd         PowerSGD and its state
"""
