"""Tools that measure one figure each: `python scripts/bench NAME` runs `main` of the module of that name."""
