"""Lightning's ``.ckpt``: a file of ``torch.save`` whose dictionary has keys of Lightning's own.

Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py (2.6), ``dump_checkpoint``. A
sharded one is a directory with ``meta.pt`` beside a distributed checkpoint (``dcp``).
"""

from __future__ import annotations

import re

from cxlfs.checkpoint.jsons import number_or_none
from cxlfs.checkpoint.model import Contents, IncompleteError
from cxlfs.checkpoint.pickles import Pairs

KIND = "lightning"
LAST = re.compile(r"last(?:-v\d{1,9})?\.ckpt")
"""What ``ckpt_path="last"`` resumes from (``CHECKPOINT_NAME_LAST``)."""
_MARK = "pytorch-lightning_version"
_NEEDED = ("state_dict", "global_step", "epoch")


def refine(contents: Contents) -> None:
    """Say of a file of ``torch.save`` that it is Lightning's, where it is."""
    root = contents.root
    if not isinstance(root, Pairs) or not root.has(_MARK):
        return
    contents.kind = KIND
    contents.step = number_or_none(root.get("global_step"))
    contents.epoch = number_or_none(root.get("epoch"))
    for key in _NEEDED:
        if not root.has(key):
            contents.problems.append(IncompleteError(f"{key} is missing"))
