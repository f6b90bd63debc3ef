"""Who asks where a tensor is: decisions go by `core.device_type`, which knows simulations."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import torch

import memscale
from memscale.core import compute_capability, device_type, simulated, simulation
from memscale.core.simulating import is_own_thread, joining, own_threads
from tests.support.sources import nodes_of

ROOT = Path(memscale.__file__).parent
_FLAGS = {"is_cuda", "is_cpu", "is_mps", "is_xpu"}

# Questions about the devices of this process, whose answer a simulation must not change; each with the reason.
MAY_ASK = {
    "core/simulating.py": "the one function",
    "cli/demo.py": "trains for real",
    "cli/training.py": "trains for real",
    "hardware/calibrate.py": "measures the device at hand",
    "hardware/call_seconds.py": "measures the host beside it",
    "hardware/device.py": "finds the device at hand",
    "inspection/verification.py": "runs both models for real, and compares the generators there are",
    "algebra/region.py": "sends a parameter home when the model is made, outside of any step",
    "legacy/terms.py": "the caller's model, outside of any step",
    "observability/metrics.py": "figures of the device at hand",
    "optimizers/separability.py": "the generators that there are",
    "planning/tuning/confirmation.py": "trains for real, where the device is the one that was planned for",
    "planning/prediction/sizes.py": "how much of a batch is in this process's memory",
    "regions/environment.py": "the generators that there are: a simulated device has none",
    "regions/randomness.py": "the generators that there are: a simulated device has none",
    "regions/streams.py": "the streams of this process: a simulation has none",
    "runtime/backends/cuda.py": "the backend of the devices of this process",
    "runtime/runtime.py": "picks that backend; a simulation passes in a runtime of its own",
    "runtime/parameters/movable.py": "shared memory is a matter of this process",
    "cli/telemetry.py": "what a report says of this machine",
    "simulation/sandbox/device_spoofing.py": "whether PyTorch itself has CUDA here, or has to be told of a device",
    "simulation/dispatch/operators.py": "of the kernels, which are those of the device that is simulated",
    "simulation/kernels/kernels.py": "a probe runs kernels on the device at hand",
    "simulation/kernels/shapes.py": "a key of what is remembered, from where a stand-in is",
    "simulation/measured/allocator_trace.py": "measures the device at hand",
    "simulation/measured/empirical.py": "measures the device at hand",
    "simulation/sandbox/sandbox.py": "the simulated device, by its kernels",
    "simulation/sandbox/step_scope.py": "takes the caller's tensors off their devices",
    "simulation/dispatch/fake_mode.py": "meta, which computes nothing, is left alone",
    "simulation/rules/few_bits.py": "names the caller's device in an error, before any step",
    "simulation/step.py": "where the caller's model is, before the step",
    "transforms/checkpoint/saved_results.py": "the generators that there are",
    "transforms/offload/streamed.py": "where the runtime that it is given has the parameters",
    "transforms/tile/head/lazy_logits.py": "attributes that lazy logits pass on, whoever asks",
}


def questions(path):
    """The lines of a file that ask a tensor or PyTorch for a device to decide by."""
    for node in nodes_of(path):
        if not isinstance(node, ast.Attribute):
            continue
        of_device = node.attr == "type" and (
            (isinstance(node.value, ast.Attribute) and node.value.attr == "device")
            or (isinstance(node.value, ast.Name) and node.value.id == "device")
        )
        available = node.attr == "is_available" and ast.unparse(node.value) in ("torch.cuda", "torch.accelerator")
        own = isinstance(node.value, ast.Name) and node.value.id == "self"
        if of_device or available or (node.attr in _FLAGS and not own):
            yield node.lineno


def test_what_decides_by_the_device_asks_the_one_function():
    asking = {str(path.relative_to(ROOT)): list(questions(path)) for path in sorted(ROOT.rglob("*.py"))}
    found = {name: lines for name, lines in asking.items() if lines}
    assert {name: lines for name, lines in found.items() if name not in MAY_ASK} == {}
    assert set(MAY_ASK) <= set(found), "a file that asks no more needs no permission"


def test_simulations_nest_and_end():
    tensor = torch.ones(1)
    with simulation("cuda", lambda tensor: "cuda", (7, 5)):
        assert compute_capability(tensor) == (7, 5)
        with simulation("mps", lambda tensor: "cpu"):
            assert (simulated().device_type, device_type(tensor)) == ("mps", "cpu")
            assert compute_capability(tensor) is None
    assert (simulated(), device_type(tensor)) == (None, "cpu")


def test_simulations_end_where_pytorch_cannot_take_a_key_out(monkeypatch):
    """As before 2.13, where a thread keeps the key of what has ended."""
    monkeypatch.delattr(torch._C, "_remove_obj_from_tls", raising=False)
    found = []
    for _ in range(2):
        with own_threads():
            found.append(is_own_thread())
            thread = threading.Thread(target=joining(lambda: found.append(is_own_thread())))
            thread.start()
            thread.join()
        found.append(is_own_thread())
    assert found == [True, True, False] * 2
