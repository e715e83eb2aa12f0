"""Events of caches and the observers that receive them."""

from .events import EventLog, QuantizationEvent

__all__ = ["EventLog", "QuantizationEvent"]
