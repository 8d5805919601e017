"""What methods with a part that is the same for all pages learn beforehand, from a text other than the measured one."""

from dataclasses import dataclass

import torch

from ..kernels.common import gqa_queries


@dataclass(frozen=True)
class Calibration:
    """What the keys and queries of one layer, on another text, say of its KV heads.

    Args:
        mean: fp32 [H, D], mean key.
        directions: fp32 [H, D, D], principal directions of the keys as columns, the strongest first.
        channels: fp32 [H, D], mean |q_i k_i| over all keys and over the late queries of the head's group.
    """

    mean: torch.Tensor
    directions: torch.Tensor
    channels: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, queries: torch.Tensor) -> "Calibration":
        """From keys fp32 [T, H, D] and queries fp32 [B, Hq, D]."""
        heads = keys.shape[1]
        mean, directions = fit_basis(keys, keys.shape[2])
        size = gqa_queries(queries, heads, torch.float32).abs().mean((0, 2))
        return cls(mean, directions, size * keys.abs().mean(0))


def fit_basis(keys: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [H, D] and the `rank` principal directions [H, D, R] of keys [T, H, D]."""
    mean = keys.mean(0)
    centred = (keys - mean).transpose(0, 1).double()
    directions = torch.linalg.eigh(centred.transpose(-1, -2) @ centred).eigenvectors
    return mean, directions[..., -rank:].flip(-1).float()
