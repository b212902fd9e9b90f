"""MXFP4 in PyTorch: what a routed expert's weight becomes when it is published, and training through it."""

import torch

COLUMNS = 32
_MIDDLE = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rounded(w):
    """The nearest MXFP4 values: 32 columns share the exponent floor(log2 of their largest) - 2."""
    groups = w.reshape(-1, COLUMNS)
    largest = groups.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    scale = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    middle = torch.tensor(_MIDDLE, dtype=w.dtype)
    grid = torch.tensor(_GRID, dtype=w.dtype)
    code = torch.bucketize((groups / scale).abs().contiguous(), middle)
    return (grid[code] * scale * groups.sign()).view_as(w)


def straight_through(w):
    """Forward with the rounded weight, gradient as if it had not been rounded."""
    return w + (rounded(w.detach()) - w.detach())
