"""The parts of scripts/simulate.py: clients and a device on a simulated clock, figures."""
