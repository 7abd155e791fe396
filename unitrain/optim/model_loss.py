"""Losses of models that compute their own loss, such as the models of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.errors import ModelError
from unitrain.optim.loss_weighting import LossOutput

LossAverage = Literal["auto", "samples", "tokens"]
# Suffixes of the names of the output classes of transformers for which each label is at the position of its prediction.
_UNSHIFTED_OUTPUTS = ("MaskedLMOutput", "Seq2SeqLMOutput", "TokenClassifierOutput")
# The cross-entropy with which the loss is compared is computed from float32 copies of at most this number of positions.
_POSITIONS_PER_CHUNK = 256
# The loss is compared with the cross-entropy of shifted and of unshifted labels. The comparison is conclusive if the
# smaller difference is at most this fraction of the larger difference.
_MAX_ERROR_RATIO = 0.1
_MAX_COMPARISONS = 3  # after this number of inconclusive batches, labels are assumed to be shifted
_MAX_EXCHANGES = 3  # after this number of exchanges without a conclusive batch, the assumption is final
_ADD_LOSS_FN = (
    "Let the model return its loss, as the models of transformers do for batches with 'labels', or pass a loss "
    "function: Trainer(model, optimizer, loss_fn=lambda output, batch: ...)."
)


class ModelLoss:
    """Loss function of the Trainer that returns the loss computed by the model. `loss_fn=None` is `ModelLoss()`.

    The output of the model is an object with an attribute `loss`, a mapping with the key "loss", or the loss.

    `average` states whether the loss of a batch is the mean over samples or tokens. With "samples", the loss of a batch
    is weighted by its number of samples. With "tokens", the loss of a batch is weighted by its number of labels that
    are not `ignore_index`, so that each token has the same weight on all ranks; the batch must be a mapping with the
    key `labels`. `shift_labels` is True if the model predicts the label of the next token, so that the first label of
    each sequence is not counted.

    With "auto", the name of the output's class in transformers determines `average` and `shift_labels`: language models
    and token classification have a mean over tokens if the labels are integers of two or more dimensions. A few causal
    language models, such as BartForCausalLM, do not shift the labels; to find them, the losses of the first batches are
    compared with the cross-entropy of the logits. The Trainer makes this decision once for all ranks. With other
    labels, or none, the mean is over samples. For integer labels of two or more dimensions and an output of another
    class, "auto" raises ModelError, unless `shift_labels` is set: the mean is then over tokens.

    Raises ConfigError for invalid arguments, and ModelError for an output without a loss. With "tokens", also raises
    ModelError for a batch without labels, and if `shift_labels` is None and does not follow from the class.
    """

    def __init__(
        self,
        average: LossAverage = "auto",
        *,
        labels: str = "labels",
        ignore_index: int = -100,
        shift_labels: bool | None = None,
    ) -> None:
        validation.check_choice("ModelLoss average", average, ("auto", "samples", "tokens"))
        validation.check_text("ModelLoss(labels=...)", labels, 'Use labels="labels"')
        validation.check_boolean("ModelLoss.shift_labels", shift_labels, optional=True)
        if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
            validation.check_integer("ModelLoss(ignore_index=...)", ignore_index, 0, "Use ignore_index=-100")
        self._average, self._labels_key, self._ignore_index = average, labels, ignore_index
        self._shift_labels = shift_labels
        # Whether causal language models shift the labels: as found on this rank, and as agreed by all ranks.
        self._is_shifted_here: bool | None = None
        self._is_shifted: bool | None = None
        self._num_comparisons = self._num_exchanges = 0
        self._last_exchange_step: int | None = None
        self._used_shifts: set[bool] = set()  # since the last exchange

    def __call__(self, output: Any, batch: Any) -> LossOutput:
        """Return the loss in `output`, or a pair (sum over tokens, number of tokens)."""
        loss = _find_loss(output, batch)
        counted_labels = self._find_counted_labels(output, batch, loss)
        if counted_labels is None:
            return loss
        labels, is_shifted = counted_labels
        count = ((labels[..., 1:] if is_shifted else labels) != self._ignore_index).sum()
        # The mean over no tokens is NaN. Half-precision losses are converted to float32, because the sum may overflow.
        mean = torch.where(count > 0, loss, torch.zeros_like(loss)).to(torch.promote_types(loss.dtype, torch.float32))
        return mean * count, count

    def _find_counted_labels(self, output: Any, batch: Any, loss: Tensor) -> _CountedLabels | None:
        """Return the labels to count, or None if the loss is a mean over samples."""
        if self._average == "samples":
            return None
        labels = batch.get(self._labels_key) if isinstance(batch, Mapping) else None
        name, is_auto = type(output).__name__, self._average == "auto"
        if not isinstance(labels, Tensor):
            if is_auto:
                return None
            raise ModelError(
                f'ModelLoss(average="tokens") counts the labels in a batch, but this {type(batch).__name__} does not '
                f"have a tensor {self._labels_key!r}. Name the key of the labels: "
                'ModelLoss("tokens", labels="targets").'
            )
        if is_auto and (labels.dim() < 2 or labels.is_floating_point()):
            return None
        if self._shift_labels is not None:
            return _CountedLabels(labels, self._shift_labels)
        is_shifted = _predicts_next_token(name, batch)
        if is_shifted is not None:
            return _CountedLabels(labels, is_shifted and self._shifts_labels(output, labels, loss))
        if is_auto:
            raise ModelError(
                f"The batch has labels of shape {list(labels.shape)}, and the model returned an object of class "
                f"{name}, so it is unknown whether its loss is a mean over samples or over tokens. Use "
                "loss_fn=unitrain.ModelLoss"
                '("samples"), ModelLoss("tokens", shift_labels=False), or, if the model predicts the next token, '
                'ModelLoss("tokens", shift_labels=True).'
            )
        raise ModelError(
            f"It is unknown whether the model, which returned an object of class {name}, predicts the label of the "
            'next token. Use loss_fn=unitrain.ModelLoss("tokens", shift_labels=True) if it does, and '
            "shift_labels=False otherwise."
        )

    def _shifts_labels(self, output: Any, labels: Tensor, loss: Tensor) -> bool:
        """Return whether a causal language model shifts the labels itself, which nearly all do."""
        if not self._needs_agreement:
            return self._is_shifted is not False
        if self._is_shifted_here is None and self._num_comparisons < _MAX_COMPARISONS:
            self._num_comparisons += 1
            logits = getattr(output, "logits", None)
            self._is_shifted_here = _compare_with_cross_entropy(logits, labels, loss, self._ignore_index)
        is_shifted = self._is_shifted_here is not False
        self._used_shifts.add(is_shifted)
        return is_shifted

    @property
    def _needs_agreement(self) -> bool:
        is_undecided = self._is_shifted is None and self._num_exchanges < _MAX_EXCHANGES
        return is_undecided and self._shift_labels is None and self._average != "samples"

    def agree(self, communicator: Communicator, step: int | None) -> bool:
        """Decide on all ranks alike whether causal language models shift the labels, from the batches of all ranks.
        Return whether any rank has computed a loss since the last call that contradicts the decision.

        All ranks must call this method, at the same step. It exchanges the findings of the ranks at most once per
        step, and stops after a decision or `_MAX_EXCHANGES` exchanges.
        """
        if not self._needs_agreement or (step is not None and step == self._last_exchange_step):
            return False
        self._last_exchange_step, self._num_comparisons = step, 0
        self._num_exchanges += 1
        own = [self._is_shifted_here is True, self._is_shifted_here is False, *(x in self._used_shifts for x in (1, 0))]
        counts = communicator.allreduce(torch.tensor(own, dtype=torch.int64, device="cpu"), "sum").tolist()
        num_shifted, num_unshifted, num_used_shifted, num_used_unshifted = counts
        self._used_shifts.clear()
        if num_shifted or num_unshifted:
            self._is_shifted = num_shifted >= num_unshifted
        return bool(num_used_shifted if self._is_shifted is False else num_used_unshifted)


def agree_on_shifted_labels(loss_fn: Any, communicator: Communicator, step: int | None = None) -> bool:
    """Call `loss_fn.agree` if `loss_fn` is a ModelLoss. Return whether the losses since the last call must be computed
    again. All ranks must call this function."""
    return isinstance(loss_fn, ModelLoss) and loss_fn.agree(communicator, step)


class _CountedLabels(NamedTuple):
    """Labels to count. If `is_shifted` is True, the first label of each sequence is not counted."""

    labels: Tensor
    is_shifted: bool


def _predicts_next_token(class_name: str, batch: Mapping[str, Any]) -> bool | None:
    """Return whether a model with this output class of transformers predicts the label of the next token. Return None
    if this is unknown."""
    # Models for speech with a CTC loss also return a CausalLMOutput.
    if "CausalLMOutput" in class_name and (class_name != "CausalLMOutput" or "input_ids" in batch):
        return True
    return False if class_name.endswith(_UNSHIFTED_OUTPUTS) else None


@torch.no_grad()
def _compare_with_cross_entropy(logits: Any, labels: Tensor, loss: Tensor, ignore_index: int) -> bool | None:
    """Return whether `loss` is the mean cross-entropy of `logits`, [..., positions, classes], with the label of the
    next position (True) or of the same position (False). Return None if the comparison is inconclusive, if no labels
    are counted, or if `loss` is not finite."""
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape or labels.device != logits.device:
        return None
    if labels.dim() == 1:  # a single sequence
        logits, labels = logits.unsqueeze(0), labels.unsqueeze(0)
    sums, counts = [0.0, 0.0], [0, 0]
    for row_logits, row_labels in zip(logits.flatten(0, -3), labels.flatten(0, -2), strict=True):
        for start in range(0, len(row_labels), _POSITIONS_PER_CHUNK):  # limits the memory of the float32 copy
            chunk = row_logits[start : start + _POSITIONS_PER_CHUNK].float()
            for index, offset in enumerate((1, 0)):
                targets = row_labels[start + offset : start + offset + len(chunk)].to(torch.long)
                sums[index] += float(
                    cross_entropy(chunk[: len(targets)], targets, ignore_index=ignore_index, reduction="sum")
                )
                counts[index] += int((targets != ignore_index).sum())
    if 0 in counts:
        return None
    shifted, unshifted = (abs(total / count - float(loss)) for total, count in zip(sums, counts, strict=True))
    is_distinct = min(shifted, unshifted) <= _MAX_ERROR_RATIO * max(shifted, unshifted)
    return shifted < unshifted if is_distinct and math.isfinite(shifted + unshifted) else None


def _find_loss(output: Any, batch: Any) -> Tensor:
    """Return the loss in `output`. Raises ModelError if there is none."""
    if isinstance(output, Tensor):
        if output.dim() == 0:
            return output
        raise ModelError(
            f"The Trainer has no loss_fn, and the model returned a tensor of shape {list(output.shape)} instead of a "
            "loss. Pass a loss function, as in Trainer(model, optimizer, torch.nn.CrossEntropyLoss(), ...)."
        )
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    class_name = type(output).__name__
    keys = f"The batch has {', '.join(map(repr, batch))}. " if isinstance(batch, Mapping) else ""
    if isinstance(output, tuple) and not isinstance(output, Mapping):
        raise ModelError(
            f"The Trainer has no loss_fn, and the model returned an object of class {class_name} without a loss. For a "
            f"model of transformers, use model.config.return_dict = True. {_ADD_LOSS_FN}"
        )
    raise ModelError(
        f"The Trainer has no loss_fn, and the model returned an object of class {class_name} without a loss. "
        f"{keys}{_ADD_LOSS_FN}"
    )
