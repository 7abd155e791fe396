"""Gradient reduction over ranks, complete when `backward` returns.

reference         reference implementation: one allreduce per gradient after the backward pass
wrapped_model     base class of the modules that reduce the gradients of a model
ddp_wrapper       the fast path: a subclass of DistributedDataParallel
reducer_group     the process group of DDP's reducer
model_groups      the process group of each model
hierarchical_group  allreduce within each host, then between the hosts
end_of_backward   the stages at the end of a backward pass, and their order
unused_parameters check of the first backward pass for parameters without a gradient
local_gradients   tracking of unreduced gradients, checked before each optimizer step
exact_reduction   exact sums of gradients by integer arithmetic
exact_buckets     division of gradients into the buckets and blocks of exact_reduction
logical_ranks_model  separate gradients per logical rank, reduced exactly
interleaved_ranks_model  logical ranks that take turns within a step, for synchronized BatchNorm
forward_buffers   broadcast of buffers that a training forward pass reads
half_precision    means of half-precision gradients, accumulated in float32
compression       half-precision and PowerSGD compression of buckets
power_sgd         PowerSGD and its state
"""
