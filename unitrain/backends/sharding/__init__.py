"""ZeRO: each rank holds a shard of the optimizer state (stage 1), of the gradients (stage 2) and of the parameters
(stage 3).

partition           partitioning of the parameters among the ranks
dense               views of dense tensors in storage order, in which they are partitioned
optimizer_checks    checks of the optimizers that can be sharded
optimizer_state     hooks of an optimizer, which update this rank's shard and broadcast it
gradient            the `.grad` of a parameter of which each rank stores a slice
gradient_reducer    reduction of gradients to the ranks that own them, during the backward pass
distributed_model   the module that reduces and shards gradients
tensor_parts        rectangular parts of replicated tensors, of ranges of elements, and of DTensors
state_parts         the optimizer state of one rank as parts of tensors, without communication

Stage 3, with torch's fully_shard (FSDP2):

parameters              applies fully_shard to a model, and the module that distributed_model returns
parameter_collectives   gathering of parameters and reduction of gradients, on any process group
optimizer_shards        hooks of an optimizer of sharded parameters
shards                  DTensors and complete tensors, and the state dicts of sharded models
checks                  checks of models and settings, and the choice of the blocks
state_format            whether state dicts contain complete tensors or shards
forward_passes          forward passes that all ranks run together, also without a batch
"""
