"""The options classes of the methods: small dataclasses for ``KVCacheConfig(options=...)``.

>>> from veloxquant_mlx.cache.options import SnapKVOptions
>>> SnapKVOptions(snap_budget=1024).snap_obs_window
32
"""

from ..methods.a2ats import A2ATSOptions
from ..methods.adakv import AdaKVOptions
from ..methods.age_tiered import AgeTieredKVOptions
from ..methods.amc import AMCOptions
from ..methods.anchorkv import AnchorKVOptions
from ..methods.cachegen import CacheGenOptions
from ..methods.cam import CaMOptions
from ..methods.chunkkv import ChunkKVOptions
from ..methods.curdkv import CurDKVOptions
from ..methods.gear import GEAROptions
from ..methods.h2o import H2OOptions
from ..methods.keyformer import KeyformerOptions
from ..methods.kitty import KittyOptions
from ..methods.kivi import KIVIOptions
from ..methods.knorm import L2NormOptions
from ..methods.kvquant import KVQuantOptions
from ..methods.kvtc import KVTCOptions
from ..methods.kvzip import KVzipOptions
from ..methods.minicache import MiniCacheOptions
from ..methods.morphkv import MorphKVOptions
from ..methods.nestedkv import NestedKVOptions
from ..methods.nsnquant import NSNQuantOptions
from ..methods.palu import PALUOptions
from ..methods.pyramidkv import PyramidKVOptions
from ..methods.qfilters import QFiltersOptions
from ..methods.rocketkv import RocketKVOptions
from ..methods.skvq import SKVQOptions
from ..methods.snapkv import SnapKVOptions
from ..methods.spectral import SpectralQuantOptions
from ..methods.squeeze import SqueezeAttentionOptions
from ..methods.streaming_llm import StreamingLLMOptions
from ..methods.svdq import SVDqOptions
from ..methods.tova import TOVAOptions
from ..methods.vecinfer import VecInferOptions
from ..methods.xkv import XKVOptions
from ..methods.xquant import XQuantOptions
from ..methods.zipcache import ZipCacheOptions

__all__ = [
    "A2ATSOptions",
    "AMCOptions",
    "AdaKVOptions",
    "AgeTieredKVOptions",
    "AnchorKVOptions",
    "CaMOptions",
    "CacheGenOptions",
    "ChunkKVOptions",
    "CurDKVOptions",
    "GEAROptions",
    "H2OOptions",
    "KIVIOptions",
    "KVQuantOptions",
    "KVTCOptions",
    "KVzipOptions",
    "KeyformerOptions",
    "KittyOptions",
    "L2NormOptions",
    "MiniCacheOptions",
    "MorphKVOptions",
    "NSNQuantOptions",
    "NestedKVOptions",
    "PALUOptions",
    "PyramidKVOptions",
    "QFiltersOptions",
    "RocketKVOptions",
    "SKVQOptions",
    "SVDqOptions",
    "SnapKVOptions",
    "SpectralQuantOptions",
    "SqueezeAttentionOptions",
    "StreamingLLMOptions",
    "TOVAOptions",
    "VecInferOptions",
    "XKVOptions",
    "XQuantOptions",
    "ZipCacheOptions",
]
