"""The event that caches emit, and an observer that collects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.abstractions import QuantizationObserver


@dataclass(frozen=True)
class QuantizationEvent:
    """One piece of work of a cache.

    ``stage`` is "encode" (rows left their window and were sealed), "evict" or "trim"; ``input_shape`` is ``(n,)``: the
    rows encoded (of keys and values together), dropped per head, or tokens trimmed. ``memory_delta_bytes`` are the
    bytes that the cache holds more (or fewer, negative) than before.
    """

    stage: str
    input_shape: tuple[int, ...]
    elapsed_ms: float = 0.0
    memory_delta_bytes: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)


class EventLog(QuantizationObserver):
    """Keeps every event in ``events``, in order."""

    def __init__(self) -> None:
        self.events: list[QuantizationEvent] = []

    def on_event(self, event: QuantizationEvent) -> None:
        self.events.append(event)

    def counts(self) -> dict[str, int]:
        """Events per stage."""
        return dict(Counter(event.stage for event in self.events))
