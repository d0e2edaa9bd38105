"""`jaxsgl bench`: datasets, backends, the run, and figures. Knows servers only by their protocols."""
