"""The computations of a training step.

forward          calls of the model on batches
step             the backward pass and the optimizer update
loss_weighting   loss weights for the exact mean over the samples or tokens of all ranks
model_loss       losses that the model computes
precision        autocast and loss scaling
learning_rate    scaling of learning rates with the global batch size
schedulers       schedulers that step per epoch, or require the total number of steps
scheduler_settings  settings of a scheduler, compared between a run and its checkpoint
ema              exponential moving average of the weights
local_sgd        low-communication training: local steps on every rank, and synchronizations
fragments        fragments of the parameters that are synchronized in different steps
parameter_bucket parameters that are synchronized together as one vector, and the arithmetic of a synchronization
outer_gradient   the mean of outer gradients over ranks, with compression
outer_groups     groups of ranks that train synchronously or communicate outer gradients
local_sgd_state  checks and conversions of the checkpoint state of local_sgd
"""
