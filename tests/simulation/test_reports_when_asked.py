"""The simulation stands below the reports: a profile loads them when it is asked to print or to draw itself."""

import subprocess
import sys

PROGRAM = """
import sys
import torch, memscale as ms

def loaded():
    return any(name.startswith("memscale.reports") for name in sys.modules)

profile = ms.profile(torch.nn.Linear(8, 8), torch.ones(4, 8), loss=lambda y, _: y.sum())
copy = ms.Profile.from_json(profile.to_json())
assert not loaded() and copy.diff(profile).peak_bytes == 0
assert str(profile).startswith("peak ") and loaded()
"""


def test_a_profile_loads_the_reports_when_it_is_printed():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
