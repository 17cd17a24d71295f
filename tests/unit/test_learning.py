"""Which peaks teach what: given a peak and the published table, then the profile that learns from it."""

import pytest

from brim.core.calibration import Calibration
from brim.core.profiles import ResourceTable
from brim.store.types import Peak
from brim_services.learning import restored, sample_of, teaches

TABLE = """
profiles:
  a: {vram: "100 + 2 * n", context_mib: 300}
  quiet: {vram: 100, calibration: off}
"""
PROFILES = ResourceTable.parse(TABLE, "table").profiles


def peak(profile="a", summands=(400.0, 20.0), formula_id=None, **more):
    known = PROFILES.get(profile)
    estimate = {"profile": profile, "summands": list(summands)}
    estimate["formula_id"] = formula_id or (known.formula_id if known else "")
    return Peak("t", "SIM", 500, 450, more.get("out_of_memory", False), estimate)


def test_a_peak_teaches_its_profile():
    assert teaches(peak(), PROFILES) is PROFILES["a"]
    sample = sample_of(peak(out_of_memory=True))
    assert (sample.summands, sample.peak_mib, sample.out_of_memory) == ((400.0, 20.0), 450.0, True)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(peak("quiet", (100.0,)), id="the profile's calibration is off"),
        pytest.param(peak("gone"), id="the table has no such profile any more"),
        pytest.param(peak(None), id="the task had no profile"),
        pytest.param(peak(summands=()), id="the amount was the header's"),
        pytest.param(peak(formula_id="before"), id="the table was edited since"),
        pytest.param(Peak("t", "SIM", 1, 1, False, {}), id="it was never estimated"),
    ],
)
def test_peaks_that_teach_nothing(told):
    assert teaches(told, PROFILES) is None


def test_what_cannot_be_read_is_learned_anew(caplog):
    assert restored(PROFILES["a"], b"{}").learners == {}
    assert "learned anew" in caplog.text


def test_what_was_learned_about_another_formula_is_forgotten_and_a_margin_may_change():
    known = Calibration(PROFILES["a"])
    known.learn(sample_of(peak()))
    assert restored(PROFILES["a"], known.to_json()).learners
    assert restored(PROFILES["a"].model_copy(update={"margin": 2.0}), known.to_json()).learners
    assert not restored(PROFILES["a"].model_copy(update={"context_mib": 200}), known.to_json()).learners
