"""The names of `memscale.reports` that need PyTorch; `memscale.reports` imports them on first use."""

from memscale.reports.batch_sizes import TriedSize, plot_sizes, write_sizes
from memscale.reports.frontier import DrawnPoint, PartOfPlan, Price, plot_frontier, write_frontier
from memscale.reports.perfetto import write_trace
from memscale.reports.plot import plot_profile, plot_timelines
from memscale.reports.profile_page import write_html
from memscale.reports.text import diff_text, module_text, profile_text
