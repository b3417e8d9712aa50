"""TensorFlow's SavedModel: a directory with a graph, the variables and assets.

Source: tensorflow/core/protobuf/saved_model.proto, meta_graph.proto, saved_object_graph.proto,
tensorflow/core/framework/graph.proto, op_def.proto, function.proto, attr_value.proto,
tensorflow/python/saved_model (2.21). Complete: ``saved_model.pb`` can be parsed to its leaves and
holds a graph, the assets that it names are there, and so are the variables, where it has any, as a
complete ``tensorflow`` checkpoint. The graph has no checksum, assets have none.
"""

from __future__ import annotations

from cxlfs.checkpoint.formats import protobuf
from cxlfs.checkpoint.formats.files import take_rest
from cxlfs.checkpoint.formats.protobuf import TEXT
from cxlfs.checkpoint.formats.tensorflow import take_bundle
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    ProblemError,
)
from cxlfs.checkpoint.place import Place

_NAMES = ("saved_model.pb", "saved_model.pbtxt")
_VARIABLES = "variables"
_BUNDLE = f"{_VARIABLES}/variables"
_ASSETS = "assets"
_FIELDS_MAX = 300_000
"""About half a second."""
_GRAPH = 2
_ASSET_FILE, _FILE_NAME = 6, 2
_OBJECT_GRAPH, _NODE, _VARIABLE = 7, 1, 7
_PAIRS = {1: TEXT, 2: TEXT}
_MESSAGES: protobuf.Messages = {
    "SavedModel": {_GRAPH: "MetaGraph"},
    "MetaGraph": {
        1: "MetaInfo",
        2: "Graph",
        3: "Saver",
        4: "CollectionEntry",
        5: "SignatureEntry",
        _ASSET_FILE: "AssetFile",
        _OBJECT_GRAPH: "ObjectGraph",
    },
    "MetaInfo": {1: TEXT, 2: "Ops", 4: TEXT, 5: TEXT, 6: TEXT, 8: "Pair"},
    "Pair": _PAIRS,
    "Saver": {1: TEXT, 2: TEXT, 3: TEXT},
    "Ops": {1: "Op"},
    "Op": {1: TEXT, 2: "Argument", 3: "Argument", 4: "AttributeOfOp", 5: TEXT, 6: TEXT, 20: TEXT},
    "Argument": {1: TEXT, 2: TEXT, 4: TEXT, 5: TEXT, 6: TEXT},
    "AttributeOfOp": {1: TEXT, 2: TEXT, 3: "Attribute", 4: TEXT, 7: "Attribute"},
    "Graph": {1: "Node", 2: "Library"},
    "Node": {1: TEXT, 2: TEXT, 3: TEXT, 4: TEXT, 5: "AttributeEntry", 6: "Pair"},
    "AttributeEntry": {1: TEXT, 2: "Attribute"},
    "Attribute": {1: "List", 7: "Shape", 8: "Tensor", 9: TEXT, 10: "Function"},
    "List": {7: "Shape", 8: "Tensor", 9: "Function"},
    "Shape": {2: "Dimension"},
    "Dimension": {2: TEXT},
    "Tensor": {2: "Shape"},
    "Function": {1: TEXT, 2: "AttributeEntry"},
    "Library": {1: "FunctionOfLibrary", 2: "Pair", 3: "Pair"},
    "FunctionOfLibrary": {
        1: "Op",
        3: "Node",
        4: "Pair",
        5: "AttributeEntry",
        6: "Pair",
        7: "ArgumentEntry",
    },
    "ArgumentEntry": {2: "ArgumentAttributes"},
    "ArgumentAttributes": {1: "AttributeEntry"},
    "CollectionEntry": {1: TEXT, 2: "Collection"},
    "Collection": {1: "Names"},
    "Names": {1: TEXT},
    "SignatureEntry": {1: TEXT, 2: "Signature"},
    "Signature": {1: "InfoEntry", 2: "InfoEntry", 3: TEXT},
    "InfoEntry": {1: TEXT, 2: "Info"},
    "Info": {1: TEXT, 3: "Shape"},
    "AssetFile": {1: "Info", _FILE_NAME: TEXT},
    "ObjectGraph": {_NODE: "Object", 2: "ConcreteEntry"},
    "Object": {
        1: "Reference",
        3: "Slot",
        4: "UserObject",
        6: "SavedFunction",
        _VARIABLE: "Variable",
        8: "BareFunction",
        9: "Names",
        10: "Names",
        11: "SaveableEntry",
        12: "Pair",
        13: TEXT,
        15: "Reference",
        16: TEXT,
    },
    "Reference": {2: TEXT},
    "Slot": {2: TEXT},
    "SaveableEntry": {1: TEXT},
    "UserObject": {1: TEXT, 3: TEXT},
    "SavedFunction": {1: TEXT, 2: "Specification"},
    "BareFunction": {1: TEXT, 2: TEXT, 4: "Specification"},
    "Specification": {1: "Value", 5: "Value"},
    "Variable": {2: "Shape", 6: TEXT, 7: TEXT, 8: "Variable"},
    "ConcreteEntry": {1: TEXT, 2: "Concrete"},
    "Concrete": {3: "Value", 4: "Value"},
    "Value": {
        13: TEXT,
        31: "Shape",
        33: "TensorSpecification",
        34: "TypeSpecification",
        35: "TensorSpecification",
        51: "Values",
        52: "Values",
        53: "Fields",
        54: "NamedValues",
        55: "Tensor",
        56: "Tensor",
    },
    "TensorSpecification": {1: TEXT, 2: "Shape", 4: "Tensor", 5: "Tensor"},
    "TypeSpecification": {2: "Value", 3: TEXT},
    "Values": {1: "Value"},
    "Fields": {1: "ValueEntry"},
    "ValueEntry": {1: TEXT, 2: "Value"},
    "NamedValues": {1: TEXT, 2: "ValueEntry"},
}
"""The kinds of messages that frameworks write, by names of this module."""


class SavedModel:
    kind = "saved-model"

    def recognises(self, place: Place) -> bool:
        if not place.is_directory():
            return False
        names = set(place.names())
        return bool(names & set(_NAMES)) or {_VARIABLES, _ASSETS} <= names

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        name = next((each for each in _NAMES if place.is_file(each)), None)
        contents.files.append(File(name or _NAMES[0], place.size_of(name) if name else None))
        has_variables = place.is_directory(_VARIABLES)
        try:
            if name is None:
                raise IncompleteError(f"{_NAMES[0]} is missing")
            if name.endswith(".pb"):
                has_variables |= _take_graph(place, name, contents)
        except ProblemError as error:
            contents.problems.append(error)
        if has_variables:
            take_bundle(place, _BUNDLE, contents)
        take_rest(place, contents)
        return contents


def _take_graph(place: Place, name: str, contents: Contents) -> bool:
    """Whether it has variables; its assets are looked for. Raises ProblemError."""
    with place.open(name) as reader:
        if not reader.size_bytes:
            raise IncompleteError(f"{name} is empty")
        data = reader.head(reader.size_bytes)
    try:
        graphs = [each for field, each in protobuf.fields(data) if field == _GRAPH]
        try:
            protobuf.check(data, "SavedModel", _MESSAGES, _FIELDS_MAX)
        except BeyondLimitsError as error:
            contents.notes.append(f"{name} was not looked through to its end: {error}")
        found = [_take_parts(place, each, contents) for each in graphs if isinstance(each, bytes)]
    except DamagedError as error:
        raise DamagedError(f"{name}: {error}") from error
    if not found:
        raise DamagedError(f"{name} holds no graph")
    return any(found)


def _take_parts(place: Place, graph: bytes, contents: Contents) -> bool:
    """Of one graph: its assets; whether it has variables."""
    has_variables = False
    for field, value in protobuf.fields(graph):
        if field == _ASSET_FILE and isinstance(value, bytes):
            _take_asset(place, value, contents)
        elif field == _OBJECT_GRAPH and isinstance(value, bytes):
            has_variables |= _has_variables(value)
    return has_variables


def _take_asset(place: Place, asset: bytes, contents: Contents) -> None:
    named = [value for field, value in protobuf.fields(asset) if field == _FILE_NAME]
    if not named or not isinstance(named[-1], bytes):
        raise DamagedError("an asset has no name")
    name = f"{_ASSETS}/{named[-1].decode('utf-8', 'backslashreplace')}"
    if place.size_of(name) is None:
        contents.files.append(File(place.full_name(name), None))
        contents.problems.append(IncompleteError(f"the asset {place.full_name(name)} is missing"))


def _has_variables(objects: bytes) -> bool:
    nodes = (value for field, value in protobuf.fields(objects) if field == _NODE)
    return any(
        field == _VARIABLE
        for node in nodes
        if isinstance(node, bytes)
        for field, _ in protobuf.fields(node)
    )
