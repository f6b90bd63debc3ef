"""What PyTorch settles late on a CUDA device, which a region must not see change."""

import subprocess
import sys

import pytest

FIRST_ATTENTION = """
import os, torch, torch.nn.functional as F, memscale as ms
def attend(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True) * 2
q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
ms.checkpoint()(attend)(q).sum().backward()
order = torch._C._get_sdp_priority_order()
attend(q).sum().backward()
assert torch._C._get_sdp_priority_order() == order
print(tuple(q.grad.shape), flush=True)
os._exit(0)  # a thread of autograd's that still lets go of Python objects while the interpreter ends aborts the process
"""


@pytest.mark.cuda
def test_the_first_attention_of_a_process_is_recomputed_by_the_same_kernel():
    """On Hopper it puts cuDNN's kernel first, for good."""
    done = subprocess.run([sys.executable, "-c", FIRST_ATTENTION], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 4, 64, 32)\n"
