"""The parts of scripts/simulate.py: traces, clients and a device on a simulated clock, figures."""
