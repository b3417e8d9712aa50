"""Files of models that nothing here reads: their names say so, and nobody can say how they are.

Better that than to say that there is none: a job would start anew beside them.
"""

from __future__ import annotations

from cxlfs.checkpoint.model import BeyondLimitsError, Contents, IncompleteError
from cxlfs.checkpoint.place import Reader

SUFFIXES = (".joblib", ".gguf", ".onnx", ".ubj", ".bst", ".xgb", ".pt2", ".tflite", ".nemo")


class Other:
    kind = "other"

    def recognises(self, name: str, head: bytes) -> bool:
        del head
        return name.endswith(SUFFIXES)

    def examine(self, reader: Reader) -> Contents:
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        raise BeyondLimitsError("its format is not read here")
