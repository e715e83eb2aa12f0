"""Configuration, factory, builder and caches."""

from .base import KVCacheBuilder, KVCacheConfig, KVCacheFactory
from .sliding_window_cache import SlidingWindowKVCache

__all__ = ["KVCacheBuilder", "KVCacheConfig", "KVCacheFactory", "SlidingWindowKVCache"]
