"""Exact means and metrics over ranks.

means         weighted means; the public MeanMetric
exact_sums    sums without rounding errors, for logical ranks
running_loss  mean training loss since the last periodic synchronization and over an epoch
user_metrics  metrics passed to the Trainer: functions and torchmetrics objects
torchmetrics  exact merging of torchmetrics states over ranks
"""
