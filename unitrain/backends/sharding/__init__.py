"""ZeRO: each rank holds a shard of the optimizer state (stage 1), and of the gradients (stage 2).

partition           partitioning of the parameters among the ranks
dense               views of dense tensors in storage order, in which they are partitioned
optimizer_state     hooks of an optimizer, which update this rank's shard and broadcast it
gradient            the `.grad` of a parameter of which each rank stores a slice
gradient_reducer    reduction of gradients to the ranks that own them, during the backward pass
distributed_model   the module that reduces and shards gradients
tensor_parts        rectangular parts of replicated tensors, of ranges of elements, and of DTensors
state_parts         the optimizer state of one rank as parts of tensors, without communication
"""
