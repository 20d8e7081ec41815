"""The two algorithms: paper.py and default.py. Read these first."""
