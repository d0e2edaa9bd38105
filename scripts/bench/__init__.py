"""What the commands of scripts/ share: workloads, load generators, kernel measurements, the simulator, output."""
