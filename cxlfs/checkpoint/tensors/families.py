"""What a tensor is for, and in which layer it is, by its name. Names are the usual ones of PyTorch,
Hugging Face, JAX and Keras; a name that says nothing is ``other``.
"""

from __future__ import annotations

import re

OPTIMIZER, OTHER = "optimizer", "other"
_OPTIMIZER = (
    r"optim|opt_state|exp_avg|momentum|velocity|(?:^|[./_])(?:mu|nu)(?:$|[./])"
    r"|(?:^|\.)state\.\d+\.|square_avg|accumulator|slot_variable"
)
_NORM = r"norm|(?:^|[./_])ln(?:_?\w)?(?=[./_]|$)|(?:^|[./_])bn\d*(?=[./_]|$)"
_EMBEDDING = r"embed|(?:^|[./_])(?:wte|wpe|emb|tok|pos)(?=[./_]|$)|lookup_table"
_ATTENTION = (
    r"att(?:n|ention)|(?:^|[./_])(?:[qkvo]_?proj|qkv|query|key|value|out_proj|[qkvo])(?=[./_]|$)"
)
_MLP = (
    r"mlp|ffn|feed_?forward|experts?|(?:^|[./_])(?:fc\w*|c_fc|w[123]|gate_proj|up_proj|down_proj"
    r"|intermediate|dense\w*|linear\d*)(?=[./_]|$)"
)
_RULES = (
    (OPTIMIZER, _OPTIMIZER),
    ("norm", _NORM),
    ("embedding", _EMBEDDING),
    ("attention", _ATTENTION),
    ("mlp", _MLP),
)
_FAMILIES = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _RULES)
FAMILIES = ("embedding", "attention", "mlp", "norm", OPTIMIZER, OTHER)
_LAYER = re.compile(
    r"(?:^|[./_])(?:layers?|h|blocks?|encoder|decoder|stages?|resblocks)[./_]?(\d{1,6})(?=[./_]|$)",
    re.IGNORECASE,
)
_ANY_NUMBER = re.compile(r"(?:^|[./_])(\d{1,6})(?=[./_]|$)")
_NAME_CHARACTERS = 512
"""Patterns look at so many."""


def family_of(name: str) -> str:
    """One of :data:`FAMILIES`; the first whose words are in the name."""
    short = name[:_NAME_CHARACTERS]
    return next((family for family, pattern in _FAMILIES if pattern.search(short)), OTHER)


def layer_of(name: str) -> int | None:
    """The number of the layer; None: the name has none."""
    short = name[:_NAME_CHARACTERS]
    match = _LAYER.search(short) or _ANY_NUMBER.search(short)
    return int(match[1]) if match is not None else None
