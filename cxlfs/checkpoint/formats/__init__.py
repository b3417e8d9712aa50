"""Every format, one module each; the table of those that are directories or groups of files.

The first that recognises a path has it, so the more special ones come first. Formats that are one
file are in ``files``.
"""

from __future__ import annotations

from cxlfs.checkpoint.formats.accelerate import Accelerate
from cxlfs.checkpoint.formats.base import Format
from cxlfs.checkpoint.formats.dcp import Distributed
from cxlfs.checkpoint.formats.deepspeed import DeepSpeed
from cxlfs.checkpoint.formats.hugging_face import HuggingFace
from cxlfs.checkpoint.formats.loose import Loose
from cxlfs.checkpoint.formats.megatron import Megatron
from cxlfs.checkpoint.formats.orbax import Orbax
from cxlfs.checkpoint.formats.saved_model import SavedModel
from cxlfs.checkpoint.formats.shards import Shards
from cxlfs.checkpoint.formats.tensorflow import Bundle

FORMATS: tuple[Format, ...] = (
    HuggingFace(),
    Accelerate(),
    Megatron(),
    DeepSpeed(),
    Orbax(),
    SavedModel(),
    Distributed(),
    Shards(),
    Bundle(),
    Loose(),
)
