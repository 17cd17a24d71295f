"""Changing a table's text: the fields are set and every other character stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core.profiles import ResourceTable, TableError
from brim.core.table_edit import change_fields

TABLE = """\
# Our tasks.
defaults: {margin: 1.2}   # shared

profiles:
  vision.segment:         # segment(url)
    # measured on an A100
    weights_mib: 900

    vram: 600 + 0.5 * width   # per pixel
    margin: 1.5
  vision.detect: {vram: "400 + 2 * width", context_mib: 100}  # one line
  vision.long:
    vram: >-
      400 +
      2 * width
  'vision.*':
    vram: 2 * width"""


def changed(profile, text=TABLE, **fields):
    return change_fields(text, "resources.yaml", profile, fields)


def test_a_value_is_replaced_and_nothing_else():
    after = changed("vision.segment", vram="700 + 0.25 * width", margin=1.08)
    assert after == TABLE.replace("600 + 0.5 * width ", "700 + 0.25 * width ").replace("1.5", "1.08")


def test_a_missing_field_is_added_below_the_formula():
    after = changed("vision.*", margin=1.08)
    assert after == TABLE + "\n    margin: 1.08"
    after = changed("vision.detect", vram="max(a, 3)", margin=1.08)
    assert after == TABLE.replace('"400 + 2 * width"', '"max(a, 3)", margin: 1.08')


def test_a_block_of_text_is_replaced_as_a_whole():
    after = changed("vision.long", vram="300 + 1 * width", margin=2)
    assert "  vision.long:\n    vram: 300 + 1 * width\n    margin: 2\n  'vision.*':\n" in after
    assert ResourceTable.parse(after, "t").profiles["vision.long"].margin == 2


def test_a_text_is_quoted_where_yaml_needs_it():
    text = "profiles:\n  t:\n    vram: 3\n"
    assert changed("t", text, vram="1 if mode == 'x' else 2").endswith("vram: 1 if mode == 'x' else 2\n")
    assert changed("t", text, vram="1 if mode == ' #' else 2").endswith("vram: \"1 if mode == ' #' else 2\"\n")
    assert changed("t", text, vram="1 if mode == ': ' else 2").endswith("vram: \"1 if mode == ': ' else 2\"\n")


@pytest.mark.parametrize(
    ("text", "profile", "fields", "reason"),
    [
        (TABLE, "vision.other", {"margin": 1}, "profile 'vision.other': the table has no such profile"),
        (TABLE, "vision.segment", {"margin": 0.5}, "profile 'vision.segment': field 'margin'"),
        (TABLE, "vision.segment", {"vram": "a.b"}, "profile 'vision.segment': field 'vram'"),
        ("- 1", "t", {"margin": 1}, "a table is a mapping"),
        (
            "profiles:\n  a: &row {vram: 3}\n  b: *row\n",
            "b",
            {"margin": 2},
            "profile 'b': cannot be changed without touching other profiles",
        ),
        (
            "profiles:\n  a: &row {vram: 3}\n  b: {<<: *row}\n",
            "b",
            {"margin": 2},
            "profile 'b': field 'margin' is written in a way",
        ),
    ],
)
def test_what_cannot_be_changed_is_refused(text, profile, fields, reason):
    with pytest.raises(TableError, match=f"resources.yaml: {reason}"):
        changed(profile, text, **fields)


COMMENTS = st.sampled_from(["", "  # note: yes", " # 'quoted' {flow}"])
FORMULAS = st.sampled_from(["1 + 2 * w", "max(w, 3)", "'5'", '"7 * w"', "1 if m == 'x' else 2", "6GiB"])


@given(st.lists(st.tuples(FORMULAS, COMMENTS, st.booleans()), min_size=1, max_size=4), st.integers(0, 3))
def test_any_row_can_be_changed_and_the_other_lines_stay(rows, chosen):
    lines = ["profiles:"]
    for number, (formula, comment, has_margin) in enumerate(rows):
        lines += [f"  t{number}:{comment}", f"    vram: {formula}{comment}", f"    # row {number}"]
        lines += [f"    margin: 1.5{comment}"] if has_margin else []
    name = f"t{chosen % len(rows)}"
    text = "\n".join(lines) + "\n"
    after = changed(name, text, vram="11 + 3 * w", margin=1.25)
    row = ResourceTable.parse(after, "t").profiles[name]
    assert (row.vram.text, row.margin) == ("11 + 3 * w", 1.25)
    kept = [line for line in text.splitlines() if line not in after.splitlines()]
    assert len(kept) <= 2
