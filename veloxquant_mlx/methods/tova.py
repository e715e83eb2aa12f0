"""TOVA: at each step drop the token that the newest query attends to least.

Paper: Oren, Hassid, Yarden, Adi, Schwartz, "Transformers are Multi-State RNNs", EMNLP 2024, arXiv:2401.06104.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._method import BACKEND, MethodInfo, check_room, ints, option

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig


@dataclass
class TOVAOptions:
    """Options of ``tova``."""

    tova_budget: int = option(512, "tokens kept", ints(2))
    tova_n_sink: int = option(4, "first tokens that always stay (paper: 0)", ints(0))
    tova_backend: str = option("auto", "how scores are computed; every choice selects the same tokens", BACKEND)


INFO = MethodInfo(
    name="tova",
    title="TOVA",
    family="eviction",
    paper="Transformers are Multi-State RNNs",
    arxiv="2401.06104",
    venue="EMNLP 2024",
    needs="real queries",
    options=TOVAOptions,
)


def check(config: FlatConfig) -> None:
    """Rules between fields."""
    check_room(config, "tova_budget", "tova_n_sink", extra=1)
