"""Position, timing and reporting of a training run.

training_progress   TrainingProgress: completed epochs, steps and samples
stopping            stop requests and time limits, on all ranks at the same step, and their periodic exchange
preemption          signals that announce the end of the job
timing              LoopTimer: how long each part of the loop takes
stragglers          ranks for which the other ranks wait
reporter            progress display and loggers behind one interface
display             the progress bar and lines
history             run.jsonl, history.jsonl and steps.jsonl
"""
