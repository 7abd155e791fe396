"""Fragments of the parameters for `local_sgd`, which are synchronized in different steps.

`backends/local_sgd_config.py` specifies the steps and the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from unitrain.backends.local_sgd_config import LocalSGDConfig
from unitrain.optim.outer_groups import OuterGroups
from unitrain.optim.parameter_bucket import ParameterBucket, create_buckets


class Fragment:
    """Parameters that are synchronized in the same steps: after step `position` of every `settings.steps` steps.

    `steps_until_merge` is the number of steps until the result of the transfer in progress is merged, or None if no
    transfer is in progress.
    """

    def __init__(self, buckets: list[ParameterBucket], position: int, settings: LocalSGDConfig) -> None:
        self.buckets, self._position, self._settings = buckets, position, settings
        self.names = [name for bucket in buckets for name in bucket.names]
        self.steps_until_merge: int | None = None

    def step(self, position: int) -> None:
        """Synchronize the parameters if this is due after step `position` of an interval. With overlapped transfers,
        start, continue or merge the transfer instead. All ranks must call this method."""
        overlap_steps = self._settings.overlap_steps
        if self.steps_until_merge is not None:
            self.steps_until_merge -= 1
            if self.steps_until_merge == 0:
                self._merge()
            # Start the second of the two collectives of a compressed transfer halfway, because both have the same size.
            elif self.steps_until_merge == overlap_steps // 2:
                for bucket in self.buckets:
                    if bucket.pending is not None:
                        bucket.pending.advance()
        if position != self._position:
            return
        if self.steps_until_merge is not None:  # the transfer is from a checkpoint with other settings
            self._merge()
        if overlap_steps == 0:
            for bucket in self.buckets:
                bucket.step()
            return
        for bucket in self.buckets:
            bucket.start_transfer()
        self.steps_until_merge = overlap_steps

    def finish_transfer(self) -> dict[str, Tensor]:
        """Wait for the transfer, and return the mean outer gradients by parameter name, to be merged later. Return an
        empty dictionary if no transfer is in progress. All ranks must call this method."""
        return {
            name: part
            for bucket in self.buckets
            if bucket.pending is not None
            for name, part in bucket.parts(bucket.pending.finish()).items()
        }

    def discard_transfer(self) -> None:
        """Wait for the transfer, and discard its result. All ranks must call this method."""
        self.finish_transfer()
        self.steps_until_merge = None
        for bucket in self.buckets:
            bucket.pending = None

    def load(
        self,
        outer: Mapping[str, Mapping[str, Tensor]],
        errors: Mapping[str, Tensor],
        steps_until_merge_by_name: Mapping[str, int],
    ) -> None:
        """Load the state of the outer optimizer, the compression errors of this rank, and the results of transfers.

        `steps_until_merge_by_name` contains the number of steps until the transfer of each parameter is merged. If the
        parameters of this fragment are not all merged after the same number of steps, or if this run averages weights,
        their transfers are discarded. The next outer gradient then includes the changes of the discarded transfers.
        """
        for bucket in self.buckets:
            bucket.load(outer, errors)
        self.steps_until_merge = None
        steps_until_merge = {steps_until_merge_by_name.get(name) for name in self.names}
        if (
            len(steps_until_merge) == 1
            and (steps := steps_until_merge.pop()) is not None
            and not self._settings.averages_weights
        ):
            self.steps_until_merge = steps
            for bucket in self.buckets:
                bucket.load_pending(outer["pending"])

    def _merge(self) -> None:
        self.steps_until_merge = None
        for bucket in self.buckets:
            bucket.merge(self._settings.mixing)


def create_fragments(
    parameters: Mapping[str, nn.Parameter], groups: OuterGroups, settings: LocalSGDConfig
) -> list[Fragment]:
    """Divide `parameters`, in their order, into fragments with about the same number of bytes. If a parameter is large,
    there may be fewer fragments than `settings.fragments`."""
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in parameters.items()}
    divided: dict[int, dict[str, nn.Parameter]] = {}
    total, before = max(sum(sizes.values()), 1), 0
    for name, parameter in parameters.items():
        middle = before + sizes[name] / 2
        divided.setdefault(min(int(middle * settings.fragments / total), settings.fragments - 1), {})[name] = parameter
        before += sizes[name]
    return [
        Fragment(create_buckets(part, groups, settings), settings.steps * (index + 1) // settings.fragments, settings)
        for index, part in divided.items()
    ]
