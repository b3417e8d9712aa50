from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import cxlfs
from cxlfs import errors
from cxlfs.cli import exit_codes
from cxlfs.errors import CxlfsError
from tests.support.cli import NOT_IMPORTED

DOCUMENT = Path(cxlfs.__file__).parent.parent / "docs" / "operations.md"


def tree(error_class: type[CxlfsError]) -> Iterator[type[CxlfsError]]:
    yield error_class
    for child in error_class.__subclasses__():
        yield from tree(child)


def own(name: str) -> list[tuple[object, str]]:
    """Values that classes set for themselves."""
    return [
        (vars(found)[name], found.__name__)
        for found in exit_codes.error_classes()
        if name in vars(found)
    ]


def test_every_error_is_in_errors_py() -> None:
    for module in pkgutil.walk_packages(cxlfs.__path__, "cxlfs."):
        if module.name not in NOT_IMPORTED:
            importlib.import_module(module.name)
    elsewhere = [c.__qualname__ for c in tree(CxlfsError) if c.__module__ != errors.__name__]
    assert elsewhere == []


def test_ids_are_set_by_every_class_and_unique() -> None:
    ids = [value for value, _ in own("id")]
    assert len(ids) == len(exit_codes.error_classes())
    assert len(set(ids)) == len(ids)


def test_an_exit_code_above_two_belongs_to_one_class() -> None:
    codes = [value for value, _ in own("exit_code") if isinstance(value, int) and value > 2]
    assert len(set(codes)) == len(codes)
    assert not set(codes) & {exit_codes.FINDINGS, exit_codes.REPAIRED}
    assert all(code < exit_codes.SIGNAL_BASE for code in codes)


def test_every_error_tells_what_to_do_next() -> None:
    assert all(kind.next_step.strip() for kind in exit_codes.error_kinds())


def test_the_document_has_the_tables_of_the_program() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    begin, end = text.index(exit_codes.BEGIN_MARK), text.index(exit_codes.END_MARK)
    assert text[begin : end + len(exit_codes.END_MARK)] == exit_codes.markdown()


def test_an_epilog_lists_the_codes_given() -> None:
    text = exit_codes.epilog(11, 3)
    codes = [int(line.split()[0]) for line in text.splitlines() if line.startswith("  ")]
    assert codes == [0, 1, 2, 3, 11]
