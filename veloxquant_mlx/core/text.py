"""How figures are written."""

from __future__ import annotations


def size(n: float) -> str:
    """Bytes in the largest unit that leaves a readable number."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while n >= 1024 and len(units) > 1:
        n, units = n / 1024, units[1:]
    return f"{n:.0f} B" if units[0] == "B" else f"{n:.1f} {units[0]}"


def kl(value: float | None) -> str:
    """Nats with four decimals, smaller ones as a power of ten."""
    return "-" if value is None else f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.0e}"
