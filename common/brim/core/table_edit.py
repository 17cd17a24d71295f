"""Changing fields of a resource table's text without touching anything else in it.

Comments, order, blank lines and quoting stay as they are, because only the characters of the changed values are
replaced. The result is parsed again and must differ from the old table in exactly those fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import yaml

from brim.core.profiles import Problem, ResourceTable, TableError

_PLAIN = re.compile(r"[\w(][\w .+*/%()<>=!,'-]*")
"""Formulas that YAML takes for a text as they stand, outside of flow mappings."""


def change_fields(text: str, source: str, profile: str, fields: Mapping[str, str | float]) -> str:
    """The table's text with a profile's fields set; fields that it lacks are added below its ``vram``.

    Raises `TableError`: the text is no table, has no such profile, a value is not allowed, or the change would
    touch more than this profile (values that profiles share by a YAML anchor).
    """
    before = ResourceTable.parse(text, source)
    if profile not in before.profiles:
        raise _error(source, profile, "the table has no such profile")
    root = yaml.compose(text, yaml.SafeLoader)
    row = _value(_value(root, "profiles"), profile)
    vram = _value(row, "vram")
    edits = []
    for name, value in fields.items():
        node = _value(row, name)
        if isinstance(node, yaml.ScalarNode):
            edits.append(_replacement(text, row, node, value))
        elif node is None and isinstance(row, yaml.MappingNode) and isinstance(vram, yaml.ScalarNode):
            edits.append(_insertion(text, row, vram, name, value))
        else:
            raise _error(source, profile, f"field '{name}' is written in a way that cannot be changed by itself")
    changed = text
    for start, end, replacement in sorted(edits, key=lambda edit: edit[0], reverse=True):
        changed = changed[:start] + replacement + changed[end:]
    _verify(before, ResourceTable.parse(changed, source), source, profile, fields)
    return changed


def _value(mapping: yaml.Node | None, key: str) -> yaml.Node | None:
    """The value under a key of a mapping node."""
    if not isinstance(mapping, yaml.MappingNode):
        return None
    return next((value for found, value in mapping.value if found.value == key), None)


def _replacement(text: str, row: yaml.Node | None, node: yaml.ScalarNode, value: str | float) -> tuple[int, int, str]:
    start, end = node.start_mark.index, node.end_mark.index
    is_block = node.style in ("|", ">")
    quoted = node.style in ("'", '"') or (isinstance(row, yaml.MappingNode) and bool(row.flow_style))
    return start, end, _scalar(value, quoted=quoted) + ("\n" if is_block else "")


def _insertion(
    text: str, row: yaml.MappingNode, vram: yaml.ScalarNode, name: str, value: str | float
) -> tuple[int, int, str]:
    end = vram.end_mark.index
    if row.flow_style:
        return end, end, f", {name}: {_scalar(value, quoted=True)}"
    indent = " " * row.value[0][0].start_mark.column
    if text[end - 1] == "\n":
        return end, end, f"{indent}{name}: {_scalar(value, quoted=False)}\n"
    line_end = text.find("\n", end)
    where = len(text) if line_end < 0 else line_end
    return where, where, f"\n{indent}{name}: {_scalar(value, quoted=False)}"


def _scalar(value: str | float, *, quoted: bool) -> str:
    """A value as YAML; texts are quoted where they have to be or were."""
    if not isinstance(value, str):
        return f"{value:g}"
    return json.dumps(value) if quoted or not _PLAIN.fullmatch(value) else value


def _verify(
    before: ResourceTable, after: ResourceTable, source: str, profile: str, fields: Mapping[str, str | float]
) -> None:
    """Refuse a change that did something else than set the fields."""
    wanted = dict(before.profiles)
    old = wanted[profile].model_dump(exclude_unset=True)
    wanted[profile] = type(wanted[profile]).model_validate(old | dict(fields))
    if dict(after.profiles) != wanted:
        raise _error(source, profile, "cannot be changed without touching other profiles, which share its values")


def _error(source: str, profile: str, reason: str) -> TableError:
    return TableError((Problem(source, f"profile {profile!r}", "", reason),))
