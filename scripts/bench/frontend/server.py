"""`python -m jaxsgl.serve` with the fake engine in the engine's place, and with a profile on demand.

python -m bench.frontend.server PLAN [flags of jaxsgl.serve]
"""

from __future__ import annotations

import sys

from bench.frontend.plan import Plan
from bench.frontend.sampling_profile import SamplingProfile
from jaxsgl.serve import run


def main() -> None:
    """The server process."""
    plan_path = sys.argv.pop(1)
    SamplingProfile(Plan.load(plan_path).profile_path).install()
    run([sys.executable, "-m", "bench.frontend.engine", plan_path])


if __name__ == "__main__":
    main()
