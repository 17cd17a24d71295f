"""The pure part of brim: no Redis, no clock, no I/O; ``now`` is an argument."""
