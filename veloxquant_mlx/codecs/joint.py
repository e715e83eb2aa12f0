"""Codecs of several layers: what the layers of a group say alike is held once (``cache.joint``)."""

from __future__ import annotations

import mlx.core as mx

from .base import Axis, Codec, Codes, cast


class JointCodec(Codec):
    """Encodes the rows of the ``members`` layers of a group together, and reads those of layer ``member``.

    ``encode`` and ``fit`` get ``(B, G H, n, D)``: the heads of one layer after those of another, each as its own layer
    stores them (keys before their rotary positions, if so). ``decode``, ``scores`` and ``mix`` are about the heads
    ``(B, H, ...)`` of ``member``. An array named ``m1.scales`` belongs to layer 1 of the group; any other is shared:
    it is held once, and counted at the first layer.
    """

    def __init__(self, members: int = 1, member: int = 0) -> None:
        self.members, self.member = members, member

    def owns(self, name: str) -> bool:
        owner, dot, _ = name.partition(".")
        return owner == f"m{self.member}" if dot else self.member == 0

    def parts(self, x: mx.array) -> list[mx.array]:
        """The rows ``(B, H, n, D)`` of each layer."""
        return list(mx.split(x, self.members, axis=1)) if self.members > 1 else [x]

    def own(self, name: str) -> str:
        """The name of this layer's own array."""
        return f"m{self.member}.{name}"


class JointRows(JointCodec):
    """Rows as they come, each layer its own: what a joint codec becomes where sharing would save nothing.

    Codes: ``m<j>.rows`` ``(B, H, n, D)`` of every layer, in ``dtype`` or the one that they came in.
    """

    def __init__(self, members: int = 1, member: int = 0, why: str = "", dtype: mx.Dtype | None = None) -> None:
        super().__init__(members, member)
        self.why, self.dtype = why, dtype
        self.layout = {f"m{j}.rows": Axis(2, 1) for j in range(members)}

    def encode(self, x: mx.array) -> Codes:
        rows = x if self.dtype is None else cast(x, self.dtype)
        return {f"m{j}.rows": part for j, part in enumerate(self.parts(rows))}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return cast(codes[self.own("rows")], dtype)

    def remarks(self, codes: Codes) -> tuple[str, ...]:
        return (self.why,) if self.why else ()
