"""Holds an NvmlProbe and answers commands, one JSON line each: the other end of ``Prober``."""

import json
import os
import sys
from dataclasses import asdict

from brim.core.model import canonical
from brim.gpu import process
from brim.gpu.probe import NodeFault, open_probe

OPTIONS = json.loads(sys.argv[1])


class Commands:
    def __init__(self):
        self._probe = None

    @property
    def probe(self):
        if self._probe is None:
            self._probe = open_probe("nvml", **OPTIONS)
        return self._probe

    def devices(self):
        return [asdict(device) for device in self.probe.devices()]

    def sample(self):
        return {uuid: canonical(value) for uuid, value in self.probe.sample().items()}

    def sample_after_fork(self):
        """What a forked child samples with the probe that it inherits."""
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, json.dumps(answer("sample")).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            found = json.load(file)
        os.wait()
        return found

    def close(self):
        self.probe.close()

    def in_a_container(self):
        process.pids_are_the_hosts = lambda: False

    def on_the_host(self):
        process.pids_are_the_hosts = lambda: True

    def restart_due(self):
        """As if the time between two restarts of NVML had passed."""
        self.probe._restart_at = 0.0


def answer(command, *arguments):
    try:
        return getattr(COMMANDS, command)(*arguments)
    except NodeFault as fault:
        return {"node_fault": [fault.reason.code, fault.reason.message]}


COMMANDS = Commands()
COMMANDS.on_the_host()
for line in sys.stdin:
    print(json.dumps(answer(*json.loads(line))), flush=True)
