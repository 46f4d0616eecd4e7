"""Forms of Newton-Schulz, timed and compared with float64: which of them should Muon take?

    python benchmarks/newton_schulz.py --out results/newton-schulz-h200.json

The forms differ in precision and in what is multiplied:

- bfloat16 as Muon has it now, and as torch.optim.Muon has it;
- float16 on matrices divided by their norm first: as fast on a GPU, three more bits;
- gram: the polynomials are multiplied as polynomials of the Gram matrix, and X once at the end
  (again after `RESTART` of them: rounding makes the two forget each other). It saves products of
  the long side, so it is for matrices that are not square;
- symmetric: all products but those with X are symmetric, and a kernel computes one half of them.

On a CPU (--check) it compares numbers on small matrices, with Triton's interpreter where
TRITON_INTERPRET=1 is set, and times nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from timing import milliseconds, without_host
from torch import Tensor

from learnable_multipliers.optim._newton_schulz import COEFFICIENTS, orthogonalize

Form = Callable[[Tensor], Tensor]
Product = Callable[..., Tensor]

POLYNOMIALS = COEFFICIENTS["quintic"]
RESTART = 2
"""Polynomials before X is multiplied once in between."""
SHAPES = {(1024, 1024): 96, (1024, 3584): 72}
"""Of the hidden matrices of `benchmarks/llama.py`, as many of each; tall ones are turned round."""


# -- products --------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, *, add: Tensor | None = None, alpha=1.0, beta=0.0, diagonal=0.0):
    """Return alpha a b^T + beta add + diagonal I, which is symmetric here."""
    if add is None:
        found = torch.bmm(a, b.mT)
    else:
        found = torch.baddbmm(add, a, b.mT, beta=beta, alpha=alpha)
    if diagonal:
        found.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return found


@triton.jit
def symmetric_kernel(
    a_ptr, b_ptr, add_ptr, out_ptr, size, inner, alpha, beta, diagonal,
    ADD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """Compute the tiles on and below the diagonal, and mirror them."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Tile t is (i, j), j <= i, counted row by row: t = i (i + 1) / 2 + j.
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    j = tile - i * (i + 1) // 2
    rows, cols = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_INNER)
    p_a = a_ptr + batch * size * inner + rows[:, None] * inner + ks[None, :]
    p_b = b_ptr + batch * size * inner + cols[:, None] * inner + ks[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, inner, BLOCK_INNER):
        inside = k + ks[None, :] < inner
        b_a = tl.load(p_a + k, mask=(rows[:, None] < size) & inside, other=0.0)
        b_b = tl.load(p_b + k, mask=(cols[:, None] < size) & inside, other=0.0)
        total = tl.dot(b_a, tl.trans(b_b), total)
    total *= alpha
    place = batch * size * size + rows[:, None] * size + cols[None, :]
    valid = (rows[:, None] < size) & (cols[None, :] < size)
    if ADD:
        total += beta * tl.load(add_ptr + place, mask=valid, other=0.0).to(tl.float32)
    total += tl.where(rows[:, None] == cols[None, :], diagonal, 0.0)
    b_out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, b_out, mask=valid)
    if i != j:
        mirrored = batch * size * size + cols[:, None] * size + rows[None, :]
        valid = (cols[:, None] < size) & (rows[None, :] < size)
        tl.store(out_ptr + mirrored, tl.trans(b_out), mask=valid)


def symmetric_product(
    a: Tensor, b: Tensor, *, add: Tensor | None = None, alpha=1.0, beta=0.0, diagonal=0.0, **tiles
):
    """Return the same as `product`, by half the multiplications."""
    tiles = {"BLOCK": 128, "BLOCK_INNER": 64, "num_warps": 8, "num_stages": 3} | tiles
    count, size, inner = a.shape
    out = torch.empty(count, size, size, dtype=a.dtype, device=a.device)
    side = triton.cdiv(size, tiles["BLOCK"])
    symmetric_kernel[(side * (side + 1) // 2, count)](
        a.contiguous(), b.contiguous(), a if add is None else add, out, size, inner,
        alpha, beta, diagonal, ADD=add is not None, **tiles,
    )  # fmt: skip
    return out


# -- forms -----------------------------------------------------------------------------------------


def as_torch(x: Tensor) -> Tensor:
    """Return what torch.optim.Muon computes, a batch at a time."""
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in POLYNOMIALS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def divided(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices over their Frobenius norm, in another precision."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    return torch.mul(x, 1 / norm.clamp(min=1e-7)).to(dtype)


def standard(x: Tensor, dtype: torch.dtype, multiply: Product = product) -> Tensor:
    """Apply the polynomials to X one after the other."""
    x = divided(x, dtype)
    for a, b, c in POLYNOMIALS:
        gram = multiply(x, x)
        x = torch.bmm(multiply(gram, gram, add=gram, alpha=c, beta=b, diagonal=a), x)
    return x


def gram_form(x: Tensor, dtype: torch.dtype, multiply: Product = product) -> Tensor:
    """Multiply the polynomials first: X_k = Q_k X with Q_k a polynomial of R = X X^T."""
    x, last = divided(x, dtype), len(POLYNOMIALS) - 1
    gram, joined = multiply(x, x), None
    for step, (a, b, c) in enumerate(POLYNOMIALS):
        if step == RESTART and joined is not None:
            x = torch.bmm(joined, x)
            gram, joined = multiply(x, x), None
        poly = multiply(gram, gram, add=gram, alpha=c, beta=b, diagonal=a)
        joined = poly if joined is None else multiply(poly, joined)
        if step != last and step + 1 != RESTART:
            # All of them are polynomials of one matrix, so they commute and stay symmetric.
            gram = multiply(multiply(poly, gram), poly)
    assert joined is not None
    return torch.bmm(joined, x)


def forms(kernel: Product) -> dict[str, Form]:
    """Return every form by name; all of them take and give wide matrices."""
    half = torch.float16
    return {
        "ours, bfloat16": partial(orthogonalize, coefficients="quintic"),
        "torch's, bfloat16": as_torch,
        "standard, float16": partial(standard, dtype=half),
        "gram, float16": partial(gram_form, dtype=half),
        "gram, bfloat16": partial(gram_form, dtype=torch.bfloat16),
        "standard, float16, symmetric": partial(standard, dtype=half, multiply=kernel),
        "gram, float16, symmetric": partial(gram_form, dtype=half, multiply=kernel),
    }


# -- comparison ------------------------------------------------------------------------------------


def spectra(count: int, rows: int, cols: int) -> dict[str, Tensor]:
    """Return matrices whose singular values fall in different ways, of the size of gradients."""
    noise = torch.randn(count, rows, cols, dtype=torch.float64)
    left, _ = torch.linalg.qr(torch.randn(count, rows, rows, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(count, cols, rows, dtype=torch.float64))
    index = torch.arange(1, rows + 1, dtype=torch.float64)
    falls = {"1/k": 1 / index, "1/k^2": 1 / index**2, "an eighth": 1.0 * (index <= rows / 8)}
    made = {name: (left * values) @ right.mT for name, values in falls.items()}
    return {name: 1e-4 * x for name, x in {"noise": noise, **made}.items()}


def errors(form: Form, device: str, rows: int, cols: int) -> dict[str, float]:
    """Return the distance from the same polynomials in float64, relative, for each spectrum."""
    torch.manual_seed(0)
    found = {}
    for name, x in spectra(2, rows, cols).items():
        expected = standard(x, torch.float64)
        result = form(x.to(device, torch.bfloat16)).cpu().double()
        found[name] = ((result - expected).norm() / expected.norm()).item()
    return found


def time_of(form: Form) -> float:
    """Return the milliseconds of orthogonalizing all hidden matrices, captured in a graph."""
    batches = [
        torch.randn(count, *shape, device="cuda", dtype=torch.bfloat16) * 1e-4
        for shape, count in SHAPES.items()
    ]

    def step() -> None:
        for batch in batches:
            form(batch)

    return milliseconds(without_host(step), repeats=20)


def main() -> None:
    """Compare, time on a GPU, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="numbers alone, on small matrices")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, sizes = ("cpu", (96, 160)) if options.check else ("cuda", (1024, 3584))
    tiles = {"BLOCK": 32, "BLOCK_INNER": 32} if options.check else {}
    rows: dict[str, dict[str, Any]] = {}
    for name, form in forms(partial(symmetric_product, **tiles)).items():
        if options.check and "symmetric" in name and not triton.knobs.runtime.interpret:
            continue
        rows[name] = {"errors": errors(form, device, *sizes)}
        if not options.check:
            rows[name]["ms"] = time_of(form)
        shown = "  ".join(f"{kind} {error:.4f}" for kind, error in rows[name]["errors"].items())
        took = "" if options.check else f"{rows[name]['ms']:7.2f} ms   "
        print(f"{name:32} {took}{shown}", flush=True)
    if options.out:
        device_name = torch.cuda.get_device_name() if not options.check else "cpu"
        found = {"device": device_name, "torch": torch.__version__, "forms": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
