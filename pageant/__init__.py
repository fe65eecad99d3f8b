"""Pageant: paged attention for LLM serving. Plan once a step, write and run once a layer."""

from pageant import graphs, ops
from pageant.api import Attention
from pageant.cache.calibrate import Scales, calibrate
from pageant.cache.out_scales import SwizzledScales
from pageant.cache.pages import LayerCache, PagedCache
from pageant.device import Device
from pageant.plan.batch import Batch
from pageant.plan.build import Plan
from pageant.ranks import ContextParallel
from pageant.select.choose import supports
from pageant.select.explain import Explanation
from pageant.types import (
    ArgumentError,
    CacheSpec,
    Features,
    Layer,
    Limits,
    Options,
    Shape,
    Support,
)

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "Attention",
    "Batch",
    "CacheSpec",
    "ContextParallel",
    "Device",
    "Explanation",
    "Features",
    "Layer",
    "LayerCache",
    "Limits",
    "Options",
    "PagedCache",
    "Plan",
    "Scales",
    "Shape",
    "Support",
    "SwizzledScales",
    "calibrate",
    "graphs",
    "ops",
    "supports",
]
