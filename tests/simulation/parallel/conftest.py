"""A process that is a rank among others which are not there."""

import pytest
import torch.distributed as dist


@pytest.fixture
def group():
    """Makes the process a rank of a group of so many."""

    def begin(world: int, rank: int = 0, backend: str = "fake") -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore() if backend == "fake" else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()
