"""Everything that the commands in scripts/ share: workloads, load generators, kernel measurements, the simulator."""
