"""Reference of the summary build, in fp32 torch on any device."""

import torch

from .record import PageFactors


def page_factors(k: torch.Tensor, v: torch.Tensor, rank: int, center: torch.Tensor) -> PageFactors:
    """Rank-r factors of N pages.

    Args:
        k: float [N, P, H, D], keys as they lie in the cache.
        v: float [N, P, H, Dv].
        rank: R.
        center: fp32 [H, D].

    Returns:
        fp32 factors [N, H, ...]: K - mu = (U_r S_r) V_r^T in the least-squares sense.

    The left singular vectors come from the P x P Gram matrix of the centred keys, never from a D x D problem. The
    columns of the basis are normalised by their own norm, not by the root of an eigenvalue: that keeps the product
    C V^T = U U^T (K - mu) exact to rounding even for singular values that vanish in the Gram matrix.
    """
    keys = k.float().permute(0, 2, 1, 3)
    mu = keys.mean(2)
    centred = keys - mu.unsqueeze(2)
    gram = centred @ centred.transpose(-1, -2)
    # LAPACK refuses a matrix with NaN or Inf: such a page gets a zero basis here and a NaN mean, which page_lse reads as
    # "no estimate" for this page alone.
    finite = torch.isfinite(gram).all(-1).all(-1)
    gram = torch.where(finite[..., None, None], gram, 0.0)
    # Centred keys sum to zero, so the vector of ones spans the null space. Its eigenvalue is moved from 0 to -trace, far
    # from every other: beside one very long key rounding would otherwise mix it with the directions of the short keys,
    # and rank 15 would not be exact.
    gram = gram - gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    left = torch.linalg.eigh(gram).eigenvectors[..., -rank:].flip(-1)
    left = _fix_signs(left)
    scaled = torch.where(finite[..., None, None], centred, 0.0).transpose(-1, -2) @ left
    norm = scaled.norm(dim=-2, keepdim=True)
    basis = scaled / norm.clamp_min(torch.finfo(torch.float32).tiny)
    mean = torch.where(finite[..., None], mu - center, float("nan"))
    return PageFactors(mean, basis, left * norm, v.float().mean(1))


def _fix_signs(left: torch.Tensor) -> torch.Tensor:
    """Make the largest entry of every column positive: a rebuild of the same page gives the same record."""
    largest = left.gather(-2, left.abs().argmax(-2, keepdim=True))
    return left * torch.where(largest < 0, -1.0, 1.0)
