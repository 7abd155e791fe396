"""The public scripts that `migrate.py` converts and `migrated_runs.py` runs, with the edits and data of each run.

The scripts are not stored in this repository. They were chosen before the conversion was written.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import public_script_data as data

TIMEOUT_SECONDS = 60
# Reasons for edits of the original script. DURATION shortens the run. Without the other edits, the script does not run
# or does not train on CPUs.
REFUSED, GPU, OUTDATED, LOSS, DURATION = "refused calls", "GPU", "current torch", "constant loss", "duration"


@dataclass(frozen=True)
class Edit:
    """A replacement of all occurrences of a text in the original script."""

    reason: str
    old: str
    new: str = ""


@dataclass(frozen=True)
class PublicFile:
    """A file of a public repository at a commit."""

    repository: str
    commit: str
    path: str

    def read(self, folder: Path | None) -> str:
        """Return the text of the file, from `folder` or from GitHub."""
        if folder is not None:
            return (folder / self.repository / self.path).read_text(encoding="utf-8")
        url = f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            text: bytes = response.read()
        return text.decode()


@dataclass(frozen=True, kw_only=True)
class PublicScript(PublicFile):
    """A training script, with its requirements for a run on CPUs and without a network.

    `modules` are other files of the same repository, and `files` are files of other repositories. `write_data` writes
    data to the folder in which the script runs. `environment` may contain {ranks} and {folder}. `original_edits` apply
    only to the original script. `difference` states why the results of the original differ by design.
    """

    library: str
    write_data: Callable[[Path], None] | None = None
    arguments: str = ""
    modules: tuple[str, ...] = ()
    files: tuple[PublicFile, ...] = ()
    packages: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    original_edits: tuple[Edit, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    difference: str = ""

    def other_files(self) -> list[PublicFile]:
        """Return the files that the script requires, except data."""
        return [*(PublicFile(self.repository, self.commit, path) for path in self.modules), *self.files]


_HOROVOD = "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a"
_EXAMPLES = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
_ACCELERATE = "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
_GLOO = Edit(GPU, '"nccl"', '"gloo"')
_ADASUM = Edit(REFUSED, "op=hvd.Adasum if args.use_adasum else hvd.Average,", "op=hvd.Average,")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HOME": "{folder}/huggingface"}

SCRIPTS = (
    PublicScript(
        library="Horovod",
        repository="horovod/horovod",
        path="examples/pytorch/pytorch_mnist.py",
        commit=_HOROVOD,
        write_data=data.write_mnist,
        arguments="--epochs 1 --batch-size 8 --test-batch-size 8 --log-interval 1 --data-dir data",
        edits=(
            _ADASUM,
            Edit(
                REFUSED,
                "        if args.use_adasum and hvd.nccl_built():\n            lr_scaler = hvd.local_size()\n",
            ),
            Edit(
                REFUSED,
                """\
    if args.num_proc:
        # run training through horovod.run
        print('Running training through horovod.run')
        horovod.run(main,
                    args=(args,),
                    np=args.num_proc,
                    hosts=args.hosts,
                    use_gloo=args.communication == 'gloo',
                    use_mpi=args.communication == 'mpi')
    else:
        # this is running via horovodrun
        main(args)""",
                "    main(args)",
            ),
        ),
    ),
    PublicScript(
        library="Horovod",
        repository="horovod/horovod",
        path="examples/pytorch/pytorch_imagenet_resnet50.py",
        commit=_HOROVOD,
        packages=("tensorboard",),
        write_data=data.write_image_folders,
        # No weight decay: the optimizer step in hvd.broadcast_optimizer_state would apply it before training.
        arguments="--train-dir data/train --val-dir data/val --epochs 1 --batch-size 2 --wd 0",
        edits=(
            _ADASUM,
            Edit(
                REFUSED,
                "        if args.use_adasum and hvd.nccl_built():\n"
                "            lr_scaler = args.batches_per_allreduce * hvd.local_size()\n",
            ),
        ),
    ),
    PublicScript(
        library="Horovod",
        repository="tczhangzhi/pytorch-distributed",
        path="horovod_distributed.py",
        commit="cd12856420858b14e02873e7d5c8cc7bb5aab5b0",
        write_data=data.write_image_folders,
        arguments="--data data --epochs 1 --batch-size 2 --print-freq 1 --wd 0",
        edits=(
            Edit(GPU, "torch.cuda.device_count()", "1"),
            Edit(GPU, "    torch.cuda.set_device(args.local_rank)\n"),
            Edit(GPU, "    model.cuda()\n"),
            Edit(GPU, "nn.CrossEntropyLoss().cuda()", "nn.CrossEntropyLoss()"),
            Edit(GPU, ".cuda(non_blocking=True)"),
            Edit(OUTDATED, "correct[:k].view(-1)", "correct[:k].reshape(-1)"),
        ),
        difference="Horovod's fp16 compression rounds differently",
    ),
    PublicScript(
        library="DDP",
        repository="pytorch/examples",
        path="distributed/ddp-tutorial-series/multigpu_torchrun.py",
        commit=_EXAMPLES,
        modules=("distributed/ddp-tutorial-series/datautils.py",),
        arguments="1 1 --batch_size 256",
        edits=(
            Edit(GPU, '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'),
            Edit(GPU, ".to(self.gpu_id)"),
            # The cross entropy of a single class is always 0.
            Edit(LOSS, "F.cross_entropy(", "F.mse_loss("),
        ),
        original_edits=(_GLOO, Edit(GPU, ", device_ids=[self.gpu_id]")),
    ),
    PublicScript(
        library="DDP",
        repository="pytorch/examples",
        path="imagenet/main.py",
        commit=_EXAMPLES,
        write_data=data.write_image_folders,
        arguments="data --no-accel --dist-backend gloo --epochs 1 --batch-size 2 --workers 0 --print-freq 1 --seed 0",
        edits=(
            Edit(
                REFUSED,
                """\
    if args.multiprocessing_distributed:
        # Since we have ngpus_per_node processes per node, the total world_size
        # needs to be adjusted accordingly
        args.world_size = ngpus_per_node * args.world_size
        # Use torch.multiprocessing.spawn to launch distributed processes: the
        # main_worker process function
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        # Simply call main_worker function
        main_worker(args.gpu, ngpus_per_node, args)
""",
                "    main_worker(args.gpu, ngpus_per_node, args)\n",
            ),
            Edit(REFUSED, "args.world_size > 1 or args.multiprocessing_distributed", "True"),
            Edit(
                REFUSED,
                """\
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        if args.multiprocessing_distributed:
            # For multiprocessing distributed training, rank needs to be the
            # global rank among all the processes
            args.rank = args.rank * ngpus_per_node + gpu
        dist.init_process_group(backend=args.dist_backend, init_method=args.dist_url,
                                world_size=args.world_size, rank=args.rank)
""",
                """\
    dist.init_process_group(backend=args.dist_backend)
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
""",
            ),
            # Without a GPU, the script trains a separate model on each rank.
            Edit(
                GPU,
                "print('using CPU, this will be slow')",
                "model = torch.nn.parallel.DistributedDataParallel(model)",
            ),
        ),
    ),
    PublicScript(
        library="DDP",
        repository="karpathy/nanoGPT",
        path="train.py",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        modules=("model.py", "configurator.py"),
        write_data=data.write_text,
        arguments="--device=cpu --dtype=float32 --compile=False --dataset=shakespeare_char --n_layer=2 --n_head=2 "
        "--n_embd=32 --block_size=32 --batch_size=4 --gradient_accumulation_steps=4 --learning_rate=0.01 "
        "--warmup_iters=0 --max_iters=3 --eval_interval=2 --eval_iters=2",
        edits=(
            Edit(
                REFUSED,
                "ddp = int(os.environ.get('RANK', -1)) != -1 # is this a ddp run?\n"
                "if ddp:\n    init_process_group(backend=backend)\n",
                "ddp = True\ninit_process_group(backend=backend)\nif ddp:\n",
            ),
            Edit(
                REFUSED,
                """\
            model.require_backward_grad_sync = (micro_step == gradient_accumulation_steps - 1)
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps # scale the loss to account for gradient accumulation
        # immediately async prefetch next batch while model is doing the forward pass on the GPU
        X, Y = get_batch('train')
        # backward pass, with gradient scaling if training in fp16
        scaler.scale(loss).backward()
""",
                """\
            pass
        with model.no_sync() if micro_step < gradient_accumulation_steps - 1 else nullcontext():
            with ctx:
                logits, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps # scale the loss to account for gradient accumulation
            # immediately async prefetch next batch while model is doing the forward pass on the GPU
            X, Y = get_batch('train')
            # backward pass, with gradient scaling if training in fp16
            scaler.scale(loss).backward()
""",
            ),
            Edit(GPU, "    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n"),
        ),
        original_edits=(Edit(GPU, "'nccl'", "'gloo'"), Edit(GPU, ", device_ids=[ddp_local_rank]")),
    ),
    PublicScript(
        library="DDP",
        repository="facebookresearch/DiT",
        path="train.py",
        commit="ed81ce2229091fd4ecc9a223645f95cf379d582b",
        modules=(
            "models.py",
            *(
                f"diffusion/{name}.py"
                for name in ("__init__", "diffusion_utils", "gaussian_diffusion", "respace", "timestep_sampler")
            ),
        ),
        packages=("diffusers", "timm"),
        write_data=data.write_images_and_autoencoder,
        arguments="--data-path data/train --model DiT-S/8 --num-classes 2 --epochs 1 --global-batch-size 4 "
        "--num-workers 0 --log-every 1",
        edits=(
            Edit(GPU, '    assert torch.cuda.is_available(), "Training currently requires at least one GPU."\n'),
            Edit(GPU, "rank % torch.cuda.device_count()", '"cpu"'),
            Edit(GPU, "    torch.cuda.set_device(device)\n"),
            Edit(GPU, "                torch.cuda.synchronize()\n"),
        ),
        original_edits=(_GLOO, Edit(GPU, ", device_ids=[rank]")),
    ),
    PublicScript(
        library="Accelerate",
        repository="huggingface/accelerate",
        path="examples/cv_example.py",
        commit=_ACCELERATE,
        packages=("accelerate", "timm"),
        write_data=data.write_pets,
        arguments="--data_dir data --cpu",
        edits=(Edit(DURATION, '"batch_size": 64', '"batch_size": 4'),),
        environment=_OFFLINE,
    ),
    PublicScript(
        library="Accelerate",
        repository="huggingface/accelerate",
        path="examples/nlp_example.py",
        commit=_ACCELERATE,
        packages=("accelerate", "datasets", "evaluate", "sklearn", "transformers"),
        files=(PublicFile("huggingface/evaluate", "a7dd338386a4fae9a1767e05eb9ef9479513d9e8", "metrics/glue/glue.py"),),
        write_data=data.write_sentence_pairs,
        arguments="--cpu",
        environment=_OFFLINE,
    ),
    PublicScript(
        library="Fabric",
        repository="Lightning-AI/pytorch-lightning",
        path="examples/fabric/image_classifier/train_fabric.py",
        commit="7f0c3436cd3f6ad3753125672024fc415cbcb414",
        packages=("lightning", "torchmetrics"),
        write_data=data.write_fabric_mnist,
        arguments="--epochs 1 --batch-size 8 --log-interval 1",
        # `fabric run` sets these variables.
        environment={
            "LT_CLI_USED": "1",
            "LT_ACCELERATOR": "cpu",
            "LT_STRATEGY": "ddp",
            "LT_DEVICES": "{ranks}",
        },
    ),
)
