"""Backends communicate tensors between ranks and reduce gradients. Read `base.py` first.

base                 the interface: `Communicator` and `Backend`, with the contract of both
lifecycle            methods that all backends inherit: the context manager, on_rank_zero, checks of the backend's state
capabilities         features that only some backends provide, such as PowerSGD state; `require_capability`; tunables
registry             backend names and their classes, including those of installed packages
local                one process without communication, the reference for the others
ddp                  torch.distributed with NCCL or Gloo
horovod/             Horovod as a torch.distributed process group
process_group        distributed models and optimizers of ddp and horovod, over the default process group
process_group_collectives  collectives of ddp and horovod
composed_collectives reducescatter and allgather of CPU tensors, composed of allreduces and broadcasts
broadcasts           concurrent broadcasts in place, for sharded optimizers
consistency          consistency check before every collective: all ranks must pass the same arguments
message_exchange     messages over direct TCP connections between ranks, for consistency checks and tensors up to 12 MiB
rank_groups          subgroups of ranks, with point-to-point communication
fork_safety          prevents deadlocks in processes that are forked from a rank
logical_ranks        assignment of logical ranks to processes, and the current logical rank
turns                functions that take turns in threads, one at a time, and exchange values
blocks               the modules of a model with given classes or sizes
checks               validation of arguments, the same on every backend
synchronized_errors  raise an error of one rank on all ranks
tensors, objects     tensors as bytes and ordered keys; Python objects as tensors
optimizer_loading    loads the state of an optimizer in the saved dtypes
compression_setting  the values of `compression=` and their formulas
local_sgd_config     the values of `local_sgd=` and their formulas
sharding/            ZeRO: optimizer state, gradients and parameters sharded across ranks
gradients/           DDP's reducer, extensions of DDP, and the steps at the end of a backward pass
pipeline/            pipeline parallelism: the stages of a model run on different ranks

Importing this package imports none of its modules; a backend is loaded only when it is requested by name.
"""
