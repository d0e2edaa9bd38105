"""What `gpu_report.py` is made of: the plan of sections, running them within a budget, and the summary."""
