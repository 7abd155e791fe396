"""Sharding and loading of data.

sharded_loader     public loader for training and evaluation loops without the Trainer
sharding           this rank's shard of data with indices, for training and evaluation
iterable_training  this rank's shard of a stream for training
training_data      settings of training data, and the interface of both kinds to the training loop
order              order of an epoch and its division into micro-batches
batch_size         batch size per rank, gradient accumulation and global batch size
dummy_batches      equal steps for ranks that have different numbers of batches
loading            loading of batches by index from a Dataset or DataLoader
iterable           loading of batches from a stream
samplers           custom samplers, whose order rank 0 draws
workers            initialization of DataLoader workers, and reports of their activity
prefetch           prefetching of the next batch
batch              functions for batches of any structure
"""
