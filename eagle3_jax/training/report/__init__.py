"""report.html of a run: one self-contained page, made from the files of the run folder alone.

.venv/bin/eagle3 report runs/NAME
"""

from eagle3_jax.training.report.page import write_report

__all__ = ["write_report"]
