"""Random episodes that every rank and worker plays for itself, and a policy that learns from what went well in them.

python examples/episodes.py
torchrun --nproc-per-node 2 examples/episodes.py --workers 2
horovodrun -np 2 python examples/episodes.py --backend horovod
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import unitrain

SIZE, LONGEST = 12, 24  # of the board, and of an episode
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
Episode = tuple[Tensor, Tensor, Tensor]


class Episodes(IterableDataset[Episode]):
    """Walks at random until the goal is reached: states [24, 4], moves [24], and whether a move went nearer [24].

    It knows nothing of ranks and workers: each has random numbers of its own, and so its own trajectories.
    """

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes

    def __iter__(self) -> Iterator[Episode]:
        for _ in range(self.episodes):
            player, goal = torch.randint(SIZE, (2, 2))
            states, nearer = torch.zeros(LONGEST, 4), torch.zeros(LONGEST)
            moves = torch.zeros(LONGEST, dtype=torch.long)
            for time in range(LONGEST):
                if player.equal(goal):
                    break
                move = torch.randint(len(MOVES), ())
                after = (player + MOVES[move]).clamp(0, SIZE - 1)
                states[time], moves[time] = torch.cat([player, goal]) / SIZE, move
                nearer[time] = (after - goal).abs().sum() < (player - goal).abs().sum()
                player = after
            yield states, moves, nearer


def every_board() -> TensorDataset:
    """Return each pair of player and goal once, as an episode of one move that any good one will do for."""
    corners = torch.cartesian_prod(*[torch.arange(SIZE)] * 4)
    states = corners[(corners[:, :2] != corners[:, 2:]).any(1)]
    after = states[:, None, :2] + MOVES
    before = (states[:, None, :2] - states[:, None, 2:]).abs().sum(-1)
    good = (after - states[:, None, 2:]).abs().sum(-1) < before  # [boards, moves]
    return TensorDataset(states[:, None] / SIZE, good.int().argmax(1, keepdim=True), good[:, None].float())


def play(policy: nn.Module, batch: Episode) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the scores of all moves in all states, and what is to be made of them."""
    states, moves, value = batch
    return policy(states), (moves, value)


def imitation_loss(scores: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum over moves that went nearer of -log p(move), and their number: each counts alike on all ranks."""
    moves, value = target
    if value.dim() == 3:  # boards: whatever goes nearer is good
        return -(scores.softmax(-1) * value).sum(-1).log().sum(), torch.tensor(float(len(value)))
    chosen = scores.log_softmax(-1).gather(-1, moves[..., None])[..., 0]
    return -(chosen * value).sum(), value.sum()


def goes_nearer(scores: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Say for each board whether the best move is a good one."""
    _, good = target
    return good[:, 0].gather(-1, scores.argmax(-1))[:, 0]


@click.command()
@click.option("--backend", help="ddp, horovod or local; what the launcher implies when left out.")
@click.option("--device", help="cpu or cuda; a GPU for each rank where there are GPUs when left out.")
@click.option("--epochs", default=10, show_default=True)
@click.option("--episodes", default=256, show_default=True, help="Per epoch, for each worker of each rank.")
@click.option("--batch-size", default=16, show_default=True, help="Trajectories per rank and micro-step.")
@click.option("--update-every", default=64, show_default=True, help="Trajectories of all ranks in an update.")
@click.option("--workers", default=0, show_default=True, help="Processes per rank that play.")
def main(backend: str | None, device: str | None, epochs: int, episodes: int, batch_size: int, **more: int) -> None:
    """Learn to walk to the goal."""
    with unitrain.init(backend, device=device) as ranks:
        torch.manual_seed(0)  # the same first weights in every run
        policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(MOVES)))
        config = unitrain.TrainConfig(
            max_epochs=epochs, batch_size=batch_size, global_batch_size=more["update_every"], eval_batch_size=4096,
            num_workers=more["workers"], stream="own",
        )  # fmt: skip
        trainer = unitrain.Trainer(
            policy, torch.optim.Adam(policy.parameters(), lr=3e-3), imitation_loss, backend=ranks, config=config,
            forward=play, metrics={"accuracy": goes_nearer},
        )  # fmt: skip
        results = trainer.fit(Episodes(episodes), every_board())
        if ranks.rank == 0:
            print(f"final val_accuracy={results['val_accuracy']:.4f} val_loss={results['val_loss']:.4f}")


if __name__ == "__main__":
    main()
