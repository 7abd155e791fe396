"""ZeRO: each rank stores a shard of the optimizer state (stage 1), the gradients (stage 2) and the parameters (stage
3).

partition           partitioning of the parameters among ranks, in storage order
optimizer_checks    validation of optimizers whose state will be sharded
optimizer_state     optimizer hooks that update this rank's shard and broadcast it
gradient            the class of a sharded `.grad`: each rank stores one shard
gradient_reducer    reduction of gradients to the ranks that own them, during the backward pass
distributed_model   the module that reduces and shards gradients
tensor_chunks       rectangular blocks of replicated tensors, of ranges of elements, and of DTensors
state_chunks        the optimizer state of one rank as chunks of tensors, without communication

Stage 3, with torch's fully_shard (FSDP2):

parameters              application of fully_shard to a model, and the module that distributed_model returns
parameter_collectives   allgathers of parameters and reductions of gradients, in any process group
optimizer_shards        hooks for an optimizer of sharded parameters
shards                  conversion of DTensors to complete tensors, and the state dicts of sharded models
checks                  validation of models and settings, and selection of the blocks
state_format            whether state dicts contain complete tensors or shards
forward_passes          forward passes that all ranks run together, even without a batch
fsdp_compat             the private APIs of FSDP2 and DTensors that this package uses
"""
