"""Progress, timing and reporting of a training run.

training_progress   TrainingProgress: completed epochs, steps and samples
stopping            stop requests and time limits, synchronized periodically so that all ranks stop at the same step
preemption          signals that announce the end of the job
reproducibility_settings  properties that must be equal in all processes with logical ranks
timing              LoopTimer: time per phase of the training loop
stragglers          detection of slow ranks, compared with other ranks and with earlier steps
slow_causes         causes of slow ranks, with suggestions
rank_evidence       evidence of the causes on this rank
cpu_evidence        time for which threads of this rank waited for a CPU core
network_evidence    counters of this rank's TCP connections
run_metrics         RunMetrics: throughput, MFU, memory and goodput at the sync points of `stopping`
flops               FLOPs of a micro-batch, and the peak FLOP/s of GPUs
goodput             GoodputMeter: the wall-clock time of a run by category, over all attempts
events              events.jsonl
prometheus          the HTTP endpoint for Prometheus
metrics_server      the HTTP server of the endpoint for Prometheus
reporter            progress display and loggers behind one interface
display             the progress bar, or progress lines
history             run.jsonl, history.jsonl and steps.jsonl
"""
