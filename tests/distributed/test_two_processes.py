"""Training over two processes, with and without memscale: FSDP2 and DDP, as accelerate has them, as Lightning has them.

The processes are forked from one that has imported what the programs need, which takes longer than the programs do.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import memscale as ms
from tests.distributed import accelerate_fsdp2, fsdp, lightning_strategies, orders, trainers
from tests.support.checks import bits
from tests.support.coverings import DEEP

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend of torch.distributed")

LIBRARIES = [
    "torch.distributed.fsdp",
    "torch.profiler",
    "memscale.legacy",
    "transformers.models.gpt2.modeling_gpt2",
    "accelerate.utils.fsdp_utils",
    *(["transformers.trainer", "lightning.pytorch"] if DEEP else []),
]


def rank_of(rank: int, folder: str, program: str) -> None:
    """Run a program as one of two processes, and leave what it found."""
    gc.freeze()  # what was imported is no garbage, and each collection would look at it
    warnings.simplefilter("ignore")  # of others' own imports
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    # Processes meet through a file: a free port may be taken by another process before it is bound.
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(importlib.import_module(program).run(rank, folder), f"{folder}/results{rank}.pt")
    dist.barrier()
    # Not the interpreter's own exit: about one time in ten it ends a thread of gloo or autograd that waits for the
    # interpreter's lock inside a noexcept function, and C++ aborts ("terminate called without an active exception").
    os._exit(0)


def by_two(program: Any, folder: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each of two processes found that run a program."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(LIBRARIES)
    mp.start_processes(rank_of, (str(folder), program.__name__), nprocs=2, start_method="forkserver")
    one, other = (torch.load(folder / f"results{rank}.pt", weights_only=False) for rank in range(2))
    return one, other


@pytest.fixture(scope="module")
def by_fsdp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return by_two(fsdp, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("name", [*fsdp.SHAPES, *fsdp.OPTIMIZERS])
def test_distributed_training_gives_the_same_losses(by_fsdp: Any, name: str) -> None:
    found, _ = by_fsdp
    assert found[name] == 0, found[name]


@pytest.mark.parametrize("name", fsdp.REFUSED)
def test_optimizers_that_would_see_something_else_are_refused(by_fsdp: Any, name: str) -> None:
    found, _ = by_fsdp
    assert fsdp.REFUSED[name][2] in found[name]


@pytest.mark.parametrize("name", fsdp.AROUND)
def test_regions_that_parameters_leave_too_early_are_refused(by_fsdp: Any, name: str) -> None:
    for found in by_fsdp:
        assert fsdp.AROUND[name][2] in found[name]


@pytest.mark.parametrize("name", fsdp.PLANS)
def test_processes_with_different_plans_are_told_on_each(by_fsdp: Any, name: str) -> None:
    for found in by_fsdp:
        message = found[name]
        if name == "each its own":
            assert message == "", "nothing says that they train one model"
        else:
            assert "different plans" in message
            assert "rank 0: " in message
            assert "rank 1: " in message
            assert repr(ms.Plan(fsdp.PLANS[name][1])) in message
            assert repr(ms.Plan(fsdp.PLANS[name][2])) in message


def test_what_is_saved_of_a_sharded_model_does_not_depend_on_its_plan(by_fsdp: Any) -> None:
    assert by_fsdp[0]["saved"] is True


@pytest.mark.deep  # by default the allocator of one process: tests/simulation/parallel/test_one_rank.py
def test_the_plan_of_a_sharded_model_keeps_to_its_budget_in_real_processes(by_fsdp: Any) -> None:
    for each in by_fsdp:
        found = each["kept to"]
        assert found["planned"] <= found["budget"] < found["plain"]
        assert found["said"] == pytest.approx(found["planned"], rel=1e-3)
        assert found["same"]


def test_a_plan_for_a_replica_is_applied_to_it(by_fsdp: Any) -> None:
    assert by_fsdp[0]["transformed replica"]


def test_the_order_of_wrap_and_what_distributes_is_free(tmp_path: Any) -> None:
    for found in by_two(orders, tmp_path):
        assert found.keys() == set(orders.CASES)
        exact = {case: off for case, off in found.items() if case[1] not in ("tile", "cast")}
        assert exact == dict.fromkeys(exact, 0)
        for (kind, how, first), off in found.items():
            if how == "tile":  # sums weight gradients in another order
                assert off < 1e-6, kind
            if how == "cast":  # in bfloat16, and the same whoever comes first
                assert 0 < off == found[kind, how, not first] < 0.1, kind


@pytest.mark.deep  # by default a wrapped model under DDP, and a Trainer in one process
def test_a_trainer_over_processes_has_the_same_numbers(tmp_path: Any) -> None:
    pytest.importorskip("transformers", reason="the Trainer is of transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    for found in by_two(trainers, tmp_path):
        for plain, ours in found.values():
            assert bits(ours) == bits(plain)
            assert len(plain[0]) == 2


def test_a_model_that_accelerate_shards_has_the_same_losses_and_keeps_no_whole_weight(tmp_path: Any) -> None:
    pytest.importorskip("transformers", reason="GPT-2 comes from transformers")
    pytest.importorskip("accelerate", reason="fsdp2_prepare_model is of accelerate")
    right = (True, 0, ("transformer.h.0", "transformer.h.1"), False)
    for found in by_two(accelerate_fsdp2, tmp_path):
        assert found == dict.fromkeys(accelerate_fsdp2.CASES, right)


@pytest.mark.deep  # by default a wrapped model under DDP and FSDP2, and Lightning in one process
def test_a_fit_under_strategies_of_lightning_has_the_same_losses(tmp_path: Any) -> None:
    pytest.importorskip("lightning", reason="the strategies are Lightning's")
    for found in by_two(lightning_strategies, tmp_path):
        assert found.keys() == lightning_strategies.CASES.keys()
        for plain, wrapped in found.values():
            assert plain == wrapped
            assert len(plain) == 4
