"""The part of decode attention that CUDA's tensor cores take: rows whose keys and values are packed (``tensor.h``)."""

from __future__ import annotations

from .sides import Form

DIMS = (64, 128, 256)
ROWS = 16  # query rows per kv head: one operand of the products
LEAST = 512  # packed rows from which they pay
STAGES = 2  # tiles of codes that are there or on their way
GROUPS = 264  # groups of lanes that a call is split into: two for each multiprocessor of the largest GPUs
HEADERS = ("readers.h", "pairs.h", "tensor_readers.h")


def readable(keys: Form, values: Form) -> bool:
    """Whether there is a kernel for rows packed like these."""
    kinds = ("token_affine", "codebook")
    if keys.kind not in (*kinds, "channel_affine") or values.kind not in kinds:
        return False
    return not keys.sketch and all(
        form.bits <= 4 and form.dim in DIMS and _whole(form.group) for form in (keys, values)
    )


def shares(count: int, heads: int, warps: int) -> int:
    """Shares that ``count`` rows of ``heads`` kv heads are split into."""
    return min(-(-count // (128 * warps)), max(1, GROUPS // heads))


def defines(keys: Form, values: Form, queries: int, same: bool) -> dict[str, int | str]:
    """Constants of ``tensor.h``; ``same``: both sides have one table."""
    both = keys.kind == values.kind == "codebook"
    return {
        "QUERIES": -(-queries // 8),
        "TILE": _tile(keys),
        "QUERY": "qt" if keys.turned == 1 else "q",
        "COPIES": 16 if both and not same else 32,
        "SAME_TABLE": int(both and same),
        "STAGES": STAGES,
        "LACED": int(values.kind == "codebook" and values.bits in (2, 4)),
    }


def shared_bytes(keys: Form, values: Form, constants: dict[str, int | str], rows: int, warps: int) -> int:
    """Bytes of shared memory: tables and codes; before those perhaps ``rows`` queries, later as many sums."""
    # an entry is a pair of levels, or two pairs (2 bits): those of one byte of codes
    one = sum(256 if f.bits == 2 else 4**f.bits for f in (keys, values) if f.kind == "codebook")
    tables = one // 2 if constants["SAME_TABLE"] else one
    tile = _tile(keys)
    stage = sum(tile * form.dim // 8 * form.bits for form in (keys, values))
    for form in (keys, values):
        if form.kind == "channel_affine":
            stage += 8 * form.dim if 2 * form.group == tile else 0
        else:
            stage += 2 * tile * (1 if form.kind == "codebook" else 2 * form.groups)
    queries = 4 * rows * keys.dim if keys.turned == 2 else 0
    return max(4 * int(constants["COPIES"]) * tables + max(warps * STAGES * stage, queries), 4 * rows * values.dim)


def _tile(keys: Form) -> int:
    """Rows that a warp takes at a time; a word along the rows has 8 of them for each of 8 lanes."""
    return 64 if keys.kind == "channel_affine" else 32


def _whole(group: int) -> bool:
    """Whether units of 8 codes lie in one group each, and chunks of a row in one or in whole ones."""
    return group == 0 or (group >= 8 and group & (group - 1) == 0)
