"""A directory that a program of one's own made for a step: files of known formats, and nothing that
says which there should be.

Never complete: what is missing from it nobody can know. Its files are looked at, so that one which
is torn or damaged is said.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint.formats.files import OF_FILES, take_files
from cxlfs.checkpoint.model import Contents
from cxlfs.checkpoint.place import Place

KIND = "files"
NAME = re.compile(
    r"\d+|(?:.*[-_=.])?(?:checkpoint|chkpt|ckpt|step|steps|epoch|iter|iteration|save)[-_=.]?\d.*",
    re.IGNORECASE,
)


class Loose:
    kind = KIND

    def recognises(self, place: Place) -> bool:
        if not place.is_directory() or NAME.fullmatch(place.name) is None:
            return False
        return any(name.endswith(OF_FILES) for name in place.names())

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        take_files(place, contents, place.names())
        contents.doubt("no framework is known that writes such a directory: it may lack a file")
        return contents
