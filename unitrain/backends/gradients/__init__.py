"""Gradients that are global when `backward` returns: DDP's reducer with its corrections, compression, and PowerSGD."""
