"""The embedded server: set up as brim demands, durable, and gone with its supervisor."""

from pathlib import Path

import pytest
import redis

from brim_services import embedded
from brim_services.keeper import members
from brim_services.supervise import ChildDied, Supervisor


def test_it_never_evicts_and_appends_to_a_file(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        server = embedded.start(supervisor, tmp_path / "data", appendfsync="always")
        session = supervisor.children["valkey"].pid or 0

        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("maxmemory-policy", "append*", "save", "dir") == {
                "maxmemory-policy": "noeviction",
                "appendonly": "yes",
                "appendfsync": "always",
                "appendfilename": "appendonly.aof",
                "appenddirname": "appendonlydir",
                "save": "",
                "dir": str(tmp_path / "data"),
            }

    assert members([session]) == []


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        server = embedded.start(supervisor, tmp_path / "data")
        with redis.Redis.from_url(server.url) as client:
            client.set("kept", "yes")
        supervisor.stop("valkey")

        again = embedded.start(supervisor, tmp_path / "data", port=server.port)

        assert again.url == server.url
        with redis.Redis.from_url(again.url) as client:
            assert client.get("kept") == b"yes"


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        server = embedded.start(supervisor, tmp_path / "data")

        with pytest.raises(ChildDied, match="Address already in use"):
            embedded.start(supervisor, tmp_path / "other", port=server.port, name="second")
