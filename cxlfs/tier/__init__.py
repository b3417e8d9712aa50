"""Checkpoints elsewhere: down a pipe to another machine, and in the object store below.

Works on a mounted directory, or any other, through POSIX and ``user.cxlfs.*`` attributes. Whatever
arrives is compared with its manifest before it gets a name, and gets it in one step.

Never: opens a store; replaces a checkpoint unless that was asked for; believes a length, a name or
a success of the other side.
"""

from cxlfs.tier.drain import Options, Outcome, drain
from cxlfs.tier.fetch import Fetched, fetch, newest
from cxlfs.tier.manifest import Had, Manifest, decode_inventory
from cxlfs.tier.objects import Bucket, open_bucket, split_url
from cxlfs.tier.record import Drained, note, tiers_of
from cxlfs.tier.stock import keep_newest
from cxlfs.tier.streams import Received, Sent, inventory, receive, send

__all__ = [
    "Bucket",
    "Drained",
    "Fetched",
    "Had",
    "Manifest",
    "Options",
    "Outcome",
    "Received",
    "Sent",
    "decode_inventory",
    "drain",
    "fetch",
    "inventory",
    "keep_newest",
    "newest",
    "note",
    "open_bucket",
    "receive",
    "send",
    "split_url",
    "tiers_of",
]
