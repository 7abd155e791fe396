"""Backends communicate tensors between ranks and reduce gradients. Read `base.py` first.

base                 the interface: `Communicator` and `Backend`, with the contract of both
lifecycle            the part of the interface that every backend shares: on_rank_zero, shutdown, failures
capabilities         features that only some backends provide, such as PowerSGD state; `require`; tunables
registry             backend names and their classes, including those of installed packages
local                one process without communication, the reference of the others
ddp                  torch.distributed with NCCL or Gloo
horovod/             Horovod as a torch.distributed process group
process_group        collectives and models of both, over any torch.distributed process group
composed_collectives reducescatter and allgather between CPUs, composed of allreduces and broadcasts
broadcasts           concurrent broadcasts in place, for sharded optimizers
consistency          the check before every collective that all ranks pass the same arguments
checks               validation of arguments, the same on every backend
synchronized_errors  an error on one rank raised on all ranks
tensors, objects     tensors as bytes and ordered keys; Python objects as tensors
compression_setting  the values of `compression=`
sharding/            an optimizer whose state is divided among the ranks
gradients/           DDP's reducer, its corrections, and the end of a backward

This package imports no module by itself, so a backend is loaded only when its name is requested.
"""
