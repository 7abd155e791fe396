"""Sharding and loading of data.

sharded_loader     public loader for training and evaluation loops without the Trainer
sharding           this rank's shard of map-style (indexed) data for training
evaluation_shard   this rank's shard of evaluation data
iterable_training  this rank's shard of an iterable dataset for training
training_data      settings of training data, and the interface that the training loop uses
order              order of the samples in an epoch, and its division into micro-batches
batch_size         batch size per rank, gradient accumulation and global batch size
dummy_batches      the same number of steps on all ranks, for ranks with different numbers of batches
loading            loading of batches by index from a Dataset or DataLoader
seeded_batches     loading of each batch with its own random seed, for logical ranks
stream_state       states of iterable datasets that can resume without reading earlier items
iterable           loading of batches from an iterable dataset
samplers           custom samplers, whose order rank 0 draws and broadcasts
workers            initialization of DataLoader workers, and reports of their activity
prefetch           prefetching of the next batch
batch              functions for nested batches
"""
