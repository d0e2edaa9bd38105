"""The parts of simulate.py: clients and a device on a simulated clock, costs of steps, and figures."""
