"""The scan of Mamba2: a linear recurrence over time with one decay per head and step.

"Transformers are SSMs" (Dao and Gu, 2024), section 6. `ssd` uses PyTorch or Triton, by device and
`backend`. It takes and returns no state: it is for training.

Shapes throughout: x (batch, length, heads, head_dim); dt (batch, length, heads), positive; A
(heads,), negative; B and C (batch, length, groups, state); D (heads,). Head h reads the B and C
of group h // (heads / groups).
"""

# A, B, C and D are the letters of the paper.
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from learnable_multipliers.kernels._backend import HAS_TRITON, Backend, use_triton
from learnable_multipliers.pretrain.model.triton_support import DTYPES

if HAS_TRITON:
    from learnable_multipliers.pretrain.model import ssd_launch as launch
else:
    launch = None

KERNEL_HEAD_DIMS = (16, 32, 64, 128)
KERNEL_STATES = (16, 32, 64, 128, 256)
KERNEL_CHUNKS = (16, 32, 64, 128)
"""Chunk sizes of the kernels, in steps."""


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk_size: int = 128,
    backend: Backend = "auto",
) -> Tensor:
    """Return the output of the scan, shaped like x.

    `auto` uses Triton on a CUDA device if the kernels support these dtypes and sizes, else
    PyTorch; `triton` raises if they do not. The chunk size belongs to the algorithm: the kernels
    use the nearest one they have, which changes the result only by rounding.
    """
    _check(x, dt, A, B, C, D, chunk_size)
    if not use_triton(backend, x.device, _unsupported_reason(x, dt, B, C)) or launch is None:
        return ssd_chunked(x, dt, A, B, C, D, chunk_size)
    chunk_size = _nearest_chunk_size(chunk_size, x.dtype)
    return launch.ssd_scan(x, dt.float(), A.float(), B, C, D.float(), chunk_size)[0]


def ssd_recurrence(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Return the output of the scan, one step at a time.

    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t^T,  y_t = state_t C_t + D x_t
    """
    wide = _wide(x, dt)
    per_group = x.shape[2] // B.shape[2]
    B, C = (t.repeat_interleave(per_group, 2).to(wide) for t in (B, C))
    values, dt = x.to(wide), dt.to(wide)
    state = values.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        write = dt[:, t, :, None, None] * values[:, t, :, :, None] * B[:, t, :, None, :]
        state = decay * state + write
        outputs.append((state @ C[:, t, :, :, None])[..., 0] + D[:, None] * values[:, t])
    return torch.stack(outputs, 1).to(x.dtype) if outputs else torch.empty_like(x)


def ssd_chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk_size: int = 128
) -> Tensor:
    """Return the output of the scan by matrix products within chunks and states between them.

    Products are taken in the dtype of x; decays, their sums and the states in float32 or wider.
    """
    _check(x, dt, A, B, C, D, chunk_size)
    batch, length, heads, head_dim = x.shape
    groups, state = B.shape[2:]
    per_group = heads // groups
    size = min(chunk_size, length)
    if x.numel() == 0:
        return torch.empty_like(x)
    # Steps of length 0 at the end neither decay the state nor write to it.
    pad = -length % size
    chunks = (length + pad) // size
    wide = _wide(x, dt)

    def chunked(tensor: Tensor) -> Tensor:
        """Return (batch, chunks, heads or groups, size, ...)."""
        tensor = F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, pad))
        return tensor.unflatten(1, (chunks, size)).transpose(2, 3)

    values, keys, queries = chunked(x), chunked(B), chunked(C)
    steps = chunked(dt.to(wide))  # (batch, chunks, heads, size)
    sums = (steps * A.to(wide)[:, None]).cumsum(-1)
    last = sums[..., -1:]

    # Within a chunk. Masked before exp: the sums above the diagonal may be large and positive.
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    scores = queries @ keys.transpose(-1, -2)  # (batch, chunks, groups, size, size)
    by_group = (groups, per_group)
    mix = scores[:, :, :, None] * (decay * steps[..., None, :]).unflatten(2, by_group)
    y = (mix.flatten(2, 3).to(x.dtype) @ values).to(wide)

    # What each chunk adds to the state; the heads of a group side by side in one product.
    written = values * (steps * (last - sums).exp())[..., None]
    written = written.to(x.dtype).unflatten(2, by_group).transpose(3, 4).flatten(4)
    added = (keys.transpose(-1, -2) @ written).to(wide)
    added = added.view(batch, chunks, groups, state, per_group, head_dim)

    # Between chunks.
    kept = last.exp().view(batch, chunks, groups, 1, per_group, 1)
    incoming = [torch.zeros_like(added[:, 0])]
    for chunk in range(chunks - 1):
        incoming.append(kept[:, chunk] * incoming[-1] + added[:, chunk])
    states = torch.stack(incoming, 1).flatten(4).to(x.dtype)
    read = (queries @ states).unflatten(4, (per_group, head_dim)).transpose(3, 4).flatten(2, 3)
    y = y + sums.exp()[..., None] * read + D.to(wide)[:, None, None] * values
    return y.transpose(2, 3).flatten(1, 2)[:, :length].to(x.dtype)


def _wide(x: Tensor, dt: Tensor) -> torch.dtype:
    """Return the dtype of decays and states: float32, or float64 if any input is."""
    return torch.promote_types(torch.promote_types(x.dtype, dt.dtype), torch.float32)


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, chunk_size: int
) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
    batch, length, heads, _ = x.shape
    wanted = {
        "dt": (dt, (batch, length, heads)),
        "A": (A, (heads,)),
        "B": (B, (batch, length, *B.shape[2:])),
        "C": (C, tuple(B.shape)),
        "D": (D, (heads,)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}; got {tuple(tensor.shape)}")
    if heads % B.shape[2] != 0:
        raise ValueError(f"{heads} heads cannot be divided evenly over {B.shape[2]} groups")


def _nearest_chunk_size(chunk_size: int, dtype: torch.dtype) -> int:
    """Return the largest chunk size of the kernels up to the given one, or their smallest."""
    # Off the tensor cores, longer chunks than this overflow the registers.
    longest = 64 if dtype == torch.float32 else KERNEL_CHUNKS[-1]
    sizes = [size for size in KERNEL_CHUNKS if size <= min(chunk_size, longest)]
    return max(sizes, default=KERNEL_CHUNKS[0])


def _unsupported_reason(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> str | None:
    """Return why the kernels do not support these tensors, or None if they do."""
    if x.dtype not in DTYPES or B.dtype != x.dtype or C.dtype != x.dtype:
        return (
            "x, B and C must share one of bfloat16, float16 and float32; "
            f"they are {x.dtype}, {B.dtype} and {C.dtype}"
        )
    if dt.dtype == torch.float64:
        return "dt is float64, and the kernels work in float32"
    if x.numel() == 0:
        return "x is empty"
    for name, number, sizes in (
        ("head_dim", x.shape[-1], KERNEL_HEAD_DIMS),
        ("state", B.shape[-1], KERNEL_STATES),
    ):
        if number not in sizes:
            return f"{name} is {number}, not one of {', '.join(map(str, sizes))}"
    return None
