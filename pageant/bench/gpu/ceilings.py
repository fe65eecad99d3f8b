"""What the device can do at most: bytes read a second, and multiplications of bf16."""

from __future__ import annotations

import torch

from pageant.bench.gpu.clock import clock_of
from pageant.bench.timing import interleaved

READ_BYTES = 4 << 30
MATRIX = 8192
MATMULS = 4


def ceilings(
    device: torch.device,
    rounds: int = 20,
    read_bytes: int = READ_BYTES,
    matrix: int = MATRIX,
) -> dict[str, float]:
    """Medians of a reduction that reads memory once, and of a square bf16 matmul.

    Args:
        device: where.
        rounds: how often each is timed.
        read_bytes: how much is read.
        matrix: rows and columns.

    Returns:
        "read_gbs" and "bf16_tflops".
    """
    clock = clock_of(device)
    numbers = torch.zeros(read_bytes // 8, dtype=torch.int64, device=device)
    a, b = (torch.randn(matrix, matrix, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def read() -> None:
        torch.sum(numbers)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    read()
    multiply()
    calls = {"read": clock.joined([read]), "multiply": clock.joined([multiply] * MATMULS)}
    times = interleaved(calls, rounds, clock.seconds)
    return {
        "read_gbs": read_bytes / times["read"].median / 1e9,
        "bf16_tflops": MATMULS * 2 * matrix**3 / times["multiply"].median / 1e12,
    }
