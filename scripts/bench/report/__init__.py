"""The GPU report: what runs, how it is watched, and what is written. See `scripts/gpu_report.py`."""
