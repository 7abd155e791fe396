"""Whether a training script gives the same numbers on every backend: recorded in its processes, compared in another."""
