"""Pipeline parallelism: the stages of a sequential model on different ranks, based on torch.distributed.pipelining.

pipeline                `Pipeline`, the public class
arguments               validation of the arguments of `Pipeline`
stages                  torch's PipelineStage with micro-batches of different shapes
stage_runner            the module of one stage, the interface that runs its micro-batches, and a class for one stage
scheduled_stage_runner  the class for several stages with torch's schedules, and the exchange of shapes between them
micro_batches           division of a batch, with weights such that the loss is the mean over the batch
partition               division of blocks into stages that minimizes the maximum time or memory
measurement             time and memory of each block
replicas                the replicas of a pipeline as a communicator, for data and metrics
complete_state          state dicts of the complete model and optimizer
overrides               changes that `unitrain verify` makes to a pipeline
"""
