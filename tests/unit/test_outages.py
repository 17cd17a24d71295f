"""Which errors of Redis mean that asking again later makes sense."""

import pytest
from redis import exceptions

from brim.store.connection import is_outage


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ConnectionError("Connection refused"),
        exceptions.BusyLoadingError("Valkey is loading the dataset in memory"),
        exceptions.ReadOnlyError("You can't write against a read only replica."),
        exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'. script: on @user_script:247."),
        exceptions.NoScriptError("No matching script."),
        exceptions.ResponseError("BUSY Valkey is busy running a script. You can only call SCRIPT KILL."),
        exceptions.ResponseError(
            "Command # 1 (HGETALL brim:device:GPU-25afa091-1 a b c d e) of pipeline caused error: BUSY Valkey is busy"
        ),
        exceptions.ResponseError("ERR Error running script (call to f_1): -OOM command not allowed"),
        OSError("Network is unreachable"),
    ],
)
def test_these_pass(error: Exception) -> None:
    assert is_outage(error)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.AuthenticationError("invalid password"),
        exceptions.NoPermissionError("this user has no permissions"),
        exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        ValueError("BUSY"),
    ],
)
def test_these_do_not(error: Exception) -> None:
    assert not is_outage(error)
