"""Callbacks: hooks into a training run, for side effects.

callback        the base class with the hooks, and the list of callbacks of a run
early_stopping  stop a run if its results no longer improve
gradient_watch  raise an error at the first gradient with nan or inf
histograms      log histograms of parameters and gradients
memory_snapshot record the allocations of GPU memory during a few steps
profiler        record a few steps with torch.profiler
"""
