"""Engines without a model and without a device, for tests and the simulator."""
