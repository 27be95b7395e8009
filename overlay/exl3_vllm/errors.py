"""What the overlay says when it refuses: one sentence with place, reason and next step."""

from __future__ import annotations


class Exl3Error(RuntimeError):
    """A refusal of the overlay.

    Parameters
    ----------
    where: file, tensor or layer that is meant.
    what: what is wrong with it, with the numbers.
    next_step: what the operator can do about it.
    """

    def __init__(self, where: str, what: str, next_step: str) -> None:
        super().__init__(f"exl3: {where}: {what}. {next_step}.")
        self.where = where
        self.what = what
        self.next_step = next_step


class CheckpointError(Exl3Error):
    """The files of a checkpoint do not hold a valid EXL3 model."""


class LayoutError(Exl3Error):
    """A valid checkpoint that can not be cut or served the way it was asked for."""


class CompletenessError(Exl3Error):
    """A tensor was left out of the model, or a layer was left without its tensors."""


class SettingError(Exl3Error):
    """An environment variable that is not understood, or that contradicts another."""


class TierError(Exl3Error):
    """A tier that can not be delivered."""
