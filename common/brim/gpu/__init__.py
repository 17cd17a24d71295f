"""Devices and their memory: the probe protocol, NVML, and simulated devices."""
