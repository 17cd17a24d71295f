"""Settings: the files repeat the model, the environment overrides them, errors say what is wrong where."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from brim.settings import ConfigurationError, PolicyChoice, Settings

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [
        "BRIM_CONFIG",
        *(f"BRIM_{s}__{f}".upper() for s, v in Settings() for f in type(v).model_fields),
    ]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def written(tmp_path: Path, text: str, name: str = "brim.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_the_file_states_every_setting_with_its_default() -> None:
    documented = tomllib.loads((CONFIGS / "brim.toml").read_text())

    assert documented == Settings().model_dump(mode="json")


def test_the_file_describes_every_setting_by_its_unit() -> None:
    lines = (CONFIGS / "brim.toml").read_text().splitlines()
    described = {m[1]: m[2] for line in lines if (m := re.match(r"(\w+) = .*? # (.+)", line))}
    for section_name, section in Settings():
        for name, field in type(section).model_fields.items():
            assert field.description, f"{section_name}.{name} has no description"
            assert name in described
            if name.endswith("_s"):
                assert "seconds" in field.description
                assert "seconds" in described[name]
            if name.endswith("_mib"):
                assert "MiB" in field.description
                assert "MiB" in described[name]


def test_the_policy_file_states_every_setting_with_its_default() -> None:
    documented = yaml.safe_load((CONFIGS / "placement.yaml").read_text())

    assert documented == PolicyChoice().model_dump(mode="json")


def test_the_environment_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, '[redis]\nurl = "redis://file:1/0"\nprefix = "file:"\n')
    monkeypatch.setenv("BRIM_REDIS__URL", "redis://environment:1/0")
    monkeypatch.setenv("BRIM_BROKER__PRIORITY_STEPS", "[0, 5]")

    settings = Settings.load(path)

    assert settings.redis.url == "redis://environment:1/0"
    assert settings.redis.prefix == "file:"
    assert settings.broker.priority_steps == (0, 5)


def test_the_default_file_and_the_variable_that_names_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load() == Settings()

    (tmp_path / "configs").mkdir()
    written(tmp_path, "[intake]\nbatch = 7\n", "configs/brim.toml")
    assert Settings.load().intake.batch == 7

    monkeypatch.setenv("BRIM_CONFIG", str(written(tmp_path, "[intake]\nbatch = 8\n", "other.toml")))
    assert Settings.load().intake.batch == 8


def test_a_child_process_gets_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        redis={"url": "redis://h:1/0"},
        broker={"global_keyprefix": "x:", "priority_steps": (0, 9)},
        resources={"table": tmp_path / "table.yaml"},
        agent={"labels": {"zone": "a"}, "headroom_mib": 1, "log_folder": tmp_path},
        results={"app_options": {"result_expires": 60}},
        security={"header_key": "k" * 32},
    )
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    placement = settings.placement.model_copy(update={"policy_file": settings.placement.policy_file.absolute()})

    assert Settings.load() == settings.model_copy(update={"placement": placement})


def test_results_go_to_the_broker_database_unless_told_otherwise() -> None:
    assert Settings(redis={"url": "redis://h:1/0"}).results_backend == "redis://h:1/0"
    assert Settings(results={"backend": "redis://r:1/0"}).results_backend == "redis://r:1/0"


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("[intake]\nbatch = 0\n", "intake.batch", "greater than 0"),
        ("[intake]\nbatsh = 1\n", "intake.batsh", "not permitted"),
        ("[intaek]\nbatch = 1\n", "intaek", "not permitted"),
        ('[redis]\nurl = "amqp://user:secret@h/"\n', "redis.url", "amqp scheme is not supported"),
        ("[broker]\npriority_steps = [3, 0]\n", "broker.priority_steps", "ascending"),
        ("[placement]\nretention_s = 60\n", "placement", "retention_s must be larger"),
        ("[redis\n", "", "line 1"),
    ],
)
def test_errors_in_the_file_name_it_the_field_and_the_reason(
    tmp_path: Path, text: str, field: str, reason: str
) -> None:
    path = written(tmp_path, text)

    with pytest.raises(ConfigurationError) as caught:
        Settings.load(path)

    [problem] = caught.value.problems
    assert (problem.source, problem.field) == (str(path), field)
    assert reason in problem.reason
    assert "secret" not in str(caught.value)


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "[intake]\nbatch = 0\n[agent]\nheadroom_mib = -1\n")

    with pytest.raises(ConfigurationError) as caught:
        Settings.load(path)

    assert [problem.field for problem in caught.value.problems] == ["intake.batch", "agent.headroom_mib"]


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("BRIM_INTAKE__BATCH", "many", "valid integer"),
        ("BRIM_INTAKE__BATSH", "1", "not permitted"),
        ("BRIM_BROKER__PRIORITY_STEPS", "[0", '"broker"'),
        ("BRIM_REDIS", "not a table", "redis"),
    ],
)
def test_errors_in_the_environment_name_the_variable_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ConfigurationError) as caught:
        Settings.load()

    [problem] = caught.value.problems
    assert problem.source == "environment"
    assert reason in str(problem)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for load in (Settings.load, PolicyChoice.load):
        with pytest.raises(ConfigurationError, match=r"missing\.toml: No such file"):
            load(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("text", "field"),
    [("policy: fastest\n", "policy"), ("weights: {packed: {speed: 1}}\n", "weights.packed.speed"), ("[1]\n", "")],
)
def test_errors_in_the_policy_name_the_file_and_the_field(tmp_path: Path, text: str, field: str) -> None:
    path = written(tmp_path, text, "placement.yaml")

    with pytest.raises(ConfigurationError) as caught:
        PolicyChoice.load(path)

    assert [(problem.source, problem.field) for problem in caught.value.problems] == [(str(path), field)]


def test_an_empty_policy_file_means_the_defaults(tmp_path: Path) -> None:
    assert PolicyChoice.load(written(tmp_path, "", "placement.yaml")) == PolicyChoice()


def test_without_the_default_policy_file_the_built_in_policy_holds(tmp_path: Path) -> None:
    assert PolicyChoice.load(Settings().placement.policy_file) == PolicyChoice()

    with pytest.raises(ConfigurationError, match=r"No such file or directory; placement\.policy_file"):
        PolicyChoice.load(tmp_path / "other.yaml")


def test_secrets_are_shown_to_nobody_but_those_who_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(security={"header_key": "s3cret" * 6}, flower={"basic_auth": "ann:s3cret"})

    assert "s3cret" not in repr(settings) + settings.model_dump_json()
    assert settings.security.key == b"s3cret" * 6
    assert settings.environment()["BRIM_FLOWER__BASIC_AUTH"] == "ann:s3cret"

    monkeypatch.setenv("BRIM_SECURITY__HEADER_KEY", "s3cret")
    with pytest.raises(ConfigurationError, match="at least 32 characters") as refused:
        Settings.load()
    assert "s3cret" not in str(refused.value)
