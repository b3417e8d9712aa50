"""What is in a checkpoint: its tensors, their statistics, what changed between two, a manifest.

Works on any directory and reads with POSIX calls alone; no framework is imported, nothing is
unpickled, memory is bounded whatever the bytes claim.

Never: changes a file, prints, decides what a checkpoint is (``formats``).
"""

from __future__ import annotations

from cxlfs.checkpoint.tensors.compare import (
    Difference,
    FamilyChange,
    TensorChange,
    difference,
)
from cxlfs.checkpoint.tensors.families import family_of, layer_of
from cxlfs.checkpoint.tensors.hints import Hint, Looked, in_order, look
from cxlfs.checkpoint.tensors.layout import layout_of, only_layout
from cxlfs.checkpoint.tensors.manifest import (
    Manifest,
    ManifestFile,
    ManifestTensor,
    Parent,
    sha256_lines,
)
from cxlfs.checkpoint.tensors.manifest import decode as decode_manifest
from cxlfs.checkpoint.tensors.manifest import read as read_manifest
from cxlfs.checkpoint.tensors.manifesting import Finding, compare, manifest_of
from cxlfs.checkpoint.tensors.model import Layout, Part, StoredTensor
from cxlfs.checkpoint.tensors.picture import draw
from cxlfs.checkpoint.tensors.statistics import Statistics, statistics

__all__ = [
    "Difference",
    "FamilyChange",
    "Finding",
    "Hint",
    "Layout",
    "Looked",
    "Manifest",
    "ManifestFile",
    "ManifestTensor",
    "Parent",
    "Part",
    "Statistics",
    "StoredTensor",
    "TensorChange",
    "compare",
    "decode_manifest",
    "difference",
    "draw",
    "family_of",
    "in_order",
    "layer_of",
    "layout_of",
    "look",
    "manifest_of",
    "only_layout",
    "read_manifest",
    "sha256_lines",
    "statistics",
]
