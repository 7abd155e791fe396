"""Imitation learning: each rank and worker generates random episodes, and a policy learns to imitate the good moves in
them.

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

BOARD_SIZE, MAX_MOVES = 12, 24
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
Episode = tuple[Tensor, Tensor, Tensor]


class Episodes(IterableDataset[Episode]):
    """Random walks that end at the goal or after 24 moves: states [24, 4], moves [24], and whether a move was good, 0
    or 1 [24].

    A good move brings the player closer to the goal. The dataset itself does not handle ranks and workers: each rank
    and worker has different random numbers, and therefore generates different episodes.
    """

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes

    def __iter__(self) -> Iterator[Episode]:
        for _ in range(self.episodes):
            player, goal = torch.randint(BOARD_SIZE, (2, 2))
            states, nearer = torch.zeros(MAX_MOVES, 4), torch.zeros(MAX_MOVES)
            moves = torch.zeros(MAX_MOVES, dtype=torch.long)
            for time in range(MAX_MOVES):
                if player.equal(goal):
                    break
                move = torch.randint(len(MOVES), ())
                after = (player + MOVES[move]).clamp(0, BOARD_SIZE - 1)
                states[time], moves[time] = torch.cat([player, goal]) / BOARD_SIZE, move
                nearer[time] = (after - goal).abs().sum() < (player - goal).abs().sum()
                player = after
            yield states, moves, nearer


def every_board() -> TensorDataset:
    """Return every combination of different player and goal positions as an episode with one move. The third tensor,
    [boards, 1, 4], marks all good moves."""
    positions = torch.cartesian_prod(*[torch.arange(BOARD_SIZE)] * 4)
    states = positions[(positions[:, :2] != positions[:, 2:]).any(1)]
    after = states[:, None, :2] + MOVES
    before = (states[:, None, :2] - states[:, None, 2:]).abs().sum(-1)
    good = (after - states[:, None, 2:]).abs().sum(-1) < before  # [boards, moves]
    return TensorDataset(states[:, None] / BOARD_SIZE, good.int().argmax(1, keepdim=True), good[:, None].float())


def compute_logits(policy: nn.Module, batch: Episode) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the logits of all moves in all states, and the target for the loss."""
    states, moves, is_good = batch
    return policy(states), (moves, is_good)


def imitation_loss(scores: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """For episodes, return the sum of -log p(move) over the good moves, and their number. For boards, return the sum of
    -log p(any good move), and the number of boards."""
    moves, is_good = target
    if is_good.dim() == 3:  # boards, where several moves may be good
        return -(scores.softmax(-1) * is_good).sum(-1).log().sum(), torch.tensor(len(is_good))
    chosen = scores.log_softmax(-1).gather(-1, moves[..., None])[..., 0]
    return -(chosen * is_good).sum(), is_good.sum().long()


def is_good_move(scores: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Return, for each board, whether the move with the highest logit is good."""
    _, good = target
    return good[:, 0].gather(-1, scores.argmax(-1))[:, 0]


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--epochs", default=10, show_default=True)
@click.option("--episodes", default=256, show_default=True, help="Per epoch, for each worker of each rank.")
@click.option("--batch-size", default=16, show_default=True, help="Episodes per rank and micro-batch.")
@click.option("--update-every", default=64, show_default=True, help="Episodes of all ranks per step.")
@click.option("--workers", default=0, show_default=True, help="Processes per rank that generate episodes.")
def main(
    backend_name: str | None, device: str | None, epochs: int, episodes: int, batch_size: int, **more: int
) -> None:
    """Train a policy that walks to the goal."""
    with unitrain.init(backend_name, device=device) as backend:
        torch.manual_seed(0)  # the same initial weights in every run
        policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(MOVES)))
        config = unitrain.TrainConfig(
            max_epochs=epochs, batch_size=batch_size, global_batch_size=more["update_every"], eval_batch_size=4096,
            num_workers=more["workers"], stream="own",
        )  # fmt: skip
        trainer = unitrain.Trainer(
            policy, torch.optim.Adam(policy.parameters(), lr=3e-3), imitation_loss, backend=backend, config=config,
            forward=compute_logits, metrics={"accuracy": is_good_move},
        )  # fmt: skip
        results = trainer.fit(Episodes(episodes), every_board())
        if backend.rank == 0:
            print(f"final val_accuracy={results['val_accuracy']:.4f} val_loss={results['val_loss']:.4f}")


if __name__ == "__main__":
    main()
