"""How much of a checkpoint is read, and how large what is made of it may become.

A checkpoint is a hostile input: each number here bounds memory or time whatever the bytes claim.
They lie some ten times above what the largest published models need (a safetensors header of 16 MiB
names 150 000 tensors; one shard of a 405 billion parameter model has about a hundred).
"""

from __future__ import annotations

from cxlfs.units import GIB, KIB, MIB

ENTRIES_MAX = 100_000
"""Names in a directory."""
DIRECTORIES_MAX = 100_000
"""Below the one that is tidied with all that it holds."""
FILES_MAX = 100_000
"""Files of one checkpoint."""
DEPTH_MAX = 4
"""Directories below a checkpoint's own."""
TENSORS_MAX = 1_000_000
NAME_CHARACTERS_MAX = 4096
"""Of a tensor's or a file's name; what is longer is damage."""
DIMENSIONS_MAX = 64
"""NumPy's own limit; TensorFlow has 254, and nobody uses them."""
NUMBER_MAX = (1 << 63) - 1
"""Of sizes, offsets and steps."""

HEADER_BYTES_MAX = 64 * MIB
"""Of one header, pickle, index or table."""
METADATA_BYTES_MAX = 512 * MIB
"""Of everything that is read of one checkpoint to know its structure."""
JSON_BYTES_MAX = 32 * MIB
JSON_PARTS_MAX = 1_500_000
"""Brackets, braces and commas: each makes an object of some 100 bytes at most."""
TEXT_BYTES_MAX = 4 * KIB
"""Of a file that holds one name or number (``latest``)."""

ZIP_ENTRIES_MAX = 300_000
ZIP_DIRECTORY_BYTES_MAX = 64 * MIB
INFLATE_BYTES_MAX = 64 * MIB
"""Of one compressed record that is read as a header."""
FRAME_BYTES_MAX = 64 * GIB
"""Of one compressed value that is gone through: zeros take some seconds."""

PICKLE_STEPS_MAX = 6_000_000
PICKLE_MEMORY_BYTES_MAX = 256 * MIB
"""Of the values a pickle builds, counted as Python takes them."""
WALK_DEPTH_MAX = 48
"""How deep nested values are looked into for tensors."""

MSGPACK_ITEMS_MAX = 1_000_000
PROTOBUF_FIELDS_MAX = 2_000_000

DAMAGED_READ_BYTES_MAX = 4 * GIB
"""Of a file that a store calls damaged: it is read to name the tensor, in some seconds."""

READ_BYTES = MIB
"""What is read at a time where a whole file is."""
