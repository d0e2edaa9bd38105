"""Tools that Anthropic defines and the client runs: a request names their type alone, the model knows the rest.

Models here know none of them, so they are shown what Anthropic's take: a description and the schema of the parameters.
conversation.py calls `definition_of`. Where the versions of a type differ, so do the parameters: the editor of
`str_replace_based_edit_tool` inserts `insert_text`, that of `str_replace_editor` inserts `new_str` and undoes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxsgl.errors import InvalidRequest

_TEXT: Mapping[str, Any] = {"type": "string"}
_LINE: Mapping[str, Any] = {"type": "integer", "minimum": 0}
_FAMILIES = ("bash_", "text_editor_", "memory_", "computer_")


class Definition(NamedTuple):
    """What a model is shown of a tool, besides its name."""

    description: str
    input_schema: Mapping[str, Any]


def _object(required: tuple[str, ...], **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False
    }  # fmt: skip


def _files(*commands: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of commands on files."""
    lines = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    return _object(
        ("command",) if "rename" in commands else ("command", "path"),
        command={"enum": list(commands)},
        path=_TEXT,
        view_range=lines | {"description": "first and last line to view; -1: to the end"},
        file_text={**_TEXT, "description": "for create"},
        old_str={**_TEXT, "description": "for str_replace: the text to replace, which stands once in the file"},
        insert_line={**_LINE, "description": "for insert: the line behind which the text comes; 0: the beginning"},
        **properties,
    )


_BASH = Definition(
    "Run a command in a bash shell that stays open between calls, or restart the shell.",
    _object(("command",), command=_TEXT, restart={"type": "boolean"}),
)
_EDITOR_WORDS = "View, create and edit files. A view of a folder lists its files."
_EDITS = ("view", "create", "str_replace", "insert")
_NEW = {**_TEXT, "description": "for str_replace: the text in its place"}
_INSERTED = {**_TEXT, "description": "for insert: the text"}
_EDITOR = Definition(_EDITOR_WORDS, _files(*_EDITS, new_str=_NEW, insert_text=_INSERTED))
_OLD_EDITOR = Definition(
    _EDITOR_WORDS,
    _files(*_EDITS, "undo_edit", new_str={**_TEXT, "description": "for str_replace and insert: the new text"}),
)
_MEMORY = Definition(
    "Keep notes in files below /memories, which outlive this conversation. View the folder before you begin.",
    _files(
        *_EDITS, "delete", "rename", new_str=_NEW, insert_text=_INSERTED,
        old_path={**_TEXT, "description": "for rename"}, new_path={**_TEXT, "description": "for rename"},
    ),
)  # fmt: skip
_KNOWN = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}


def definition_of(kind: str, given: Mapping[str, Any] | None) -> Definition | None:
    """Returns what a tool of the type `kind` is, or None if no client runs it.

    `given` is the schema that the request itself has for it. Raises `InvalidRequest` for one that a client runs, but
    whose parameters aren't known here.
    """
    if not kind.startswith(_FAMILIES):
        return None
    known = _KNOWN.get(kind)
    if known is None and given is None:
        raise InvalidRequest(
            f"a tool is of type {kind:.50}, but of those that clients run {', '.join(_KNOWN)} are known here: give it "
            "a description and an input_schema"
        )
    return Definition("" if known is None else known.description, given or (known.input_schema if known else {}))
