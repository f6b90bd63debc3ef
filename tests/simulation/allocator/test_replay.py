import contextlib
import ctypes
import dataclasses
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memscale.core.errors import ConfigError
from memscale.simulation.allocator.caching import TRIM, TRIM_IF_GROWN, AllocatorSettings, Replayed, replay

KIB, MIB = 1 << 10, 1 << 20
BYTE = 1 / MIB


def stream(*steps):
    """Events from a shorthand: a size in MiB allocates the next id, ``~id`` frees it. Ids count from 0."""
    events = []
    for step in steps:
        if step < 0:
            events.append((~step, -1))
        else:
            events.append((sum(nbytes > 0 for _, nbytes in events), int(step * MIB)))
    return events


EXPANDABLE = {"expandable_segments": True}
SPLIT_20, SPLIT_40 = {"max_split_size_bytes": 20 * MIB}, {"max_split_size_bytes": 40 * MIB}

# Worked out by hand from the rules of CUDACachingAllocator.cpp: the steps, the settings, and the peaks of
# what is allocated and reserved, in MiB.
SCENARIOS = {
    "one byte is a block of 512 in a small segment of 2 MiB": ([BYTE], {}, (512 * BYTE, 2)),
    "sizes round up to 512": ([513 * BYTE], {}, (1024 * BYTE, 2)),
    "1 MiB is the largest small request": ([1, 1], {}, (2, 2)),
    "one byte more is large and shares 20 MiB": ([1 + BYTE], {}, (1 + 512 * BYTE, 20)),
    "requests below 10 MiB share 20 MiB": ([9, 9], {}, (18, 20)),
    "from 10 MiB on a request has its own segment": ([10], {}, (10, 10)),
    "segments round up to 2 MiB, and over 1 MiB is split off": ([10 + 512 * BYTE], {}, (10 + 512 * BYTE, 12)),
    "a remainder of 1 MiB stays in the block and counts as allocated": ([11], {}, (12, 12)),
    "a cached block is used again": ([12, ~0, 12], {}, (12, 12)),
    # 30 and 14 MiB are free; 13 goes to 14 and leaves it whole, and 30 still serves the last request.
    "the smallest cached block that fits is taken": ([30, 14, ~0, ~1, 13, 30], {}, (44, 44)),
    # Three of 6 MiB fill 18 of 20; freed in the order 0, 2, 1 they and the tail are one block again.
    "a freed block merges with both neighbours": ([6, 6, 6, ~0, ~2, ~1, 20], {}, (20, 20)),
    # 6 and 8 MiB are free around the middle one, which is not enough for 14.
    "a block in use keeps its neighbours apart": ([6, 6, 6, ~0, ~2, 14], {}, (20, 34)),
    "small and large pools do not mix": ([1, 1, ~0, ~1, 2], {}, (2, 22)),
    "a shorter sequence leaves its segments behind": ([30, ~0, 32], {}, (32, 62)),
    "an expandable segment grows in pages of 20 MiB": ([30, ~0, 32], EXPANDABLE, (32, 40)),
    "an expandable segment splits off every remainder": ([11], EXPANDABLE, (11, 20)),
    "the small pool expands in pages of 2 MiB": ([1, 1, 1], EXPANDABLE, (3, 4)),
    "a remainder of 512 bytes is a small block": ([1, 1 - 512 * BYTE, 512 * BYTE], {}, (2, 2)),
    # Free are 8 MiB at the end, which can grow, 20 and 30: 5 MiB come from the 20, and 30 find the 30 untouched.
    "an expandable segment tries no larger block than it must": ([20, 2, 30, ~0, ~2, 5, 30], EXPANDABLE, (52, 60)),
    # Free are 20 MiB in front of the block in use and 10 MiB at the end, which can grow without limit and so
    # counts as larger: the second request takes the 20.
    "an expandable segment prefers the block that grows least": ([20, 10, ~0, 5, 20], EXPANDABLE, (35, 60)),
    "an oversize block serves no smaller request": ([60, ~0, 30], SPLIT_40, (60, 90)),
    "a block of the split size is oversize": ([40, ~0, 30], SPLIT_40, (40, 70)),
    "an oversize block serves a request that is less than 20 MiB smaller, unsplit": ([60, ~0, 41], SPLIT_40, (60, 60)),
    "20 MiB smaller is too small": ([60, ~0, 40], SPLIT_40, (60, 100)),
    "40 MiB of rounding allow it": ([60, ~0, 40], {**SPLIT_40, "max_non_split_rounding_bytes": 40 * MIB}, (60, 60)),
    "a larger shared segment": ([3], {"large_segment_bytes": 64 * MIB}, (3, 64)),
    "powers of two in four steps": ([1200 / 1024], {"roundup_power2_divisions": (4,) * 16}, (1280 / 1024, 20)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_replay_reserves_what_the_allocator_does(name):
    steps, settings, (allocated, reserved) = SCENARIOS[name]
    result = replay(stream(*steps), settings=AllocatorSettings(**settings))
    assert (result.allocated_peak_bytes, result.reserved_peak_bytes) == (allocated * MIB, reserved * MIB)
    assert result.out_of_memory_at is None


# The third number is what stays reserved, the last one the event that runs out of memory.
LIMITED = {
    "nothing to give back": ([60, 60], {}, (60, 60, 60, 1)),
    "a cached segment is given back for a new one": ([60, ~0, 70], {}, (70, 70, 70, None)),
    # 20 of 40 MiB are in use, and the other 20 of no use to a request of 70.
    "a segment with a block in use is not": ([40, ~0, 20, 70], {}, (40, 40, 40, 3)),
    "an expandable segment adds 3 pages to the free 20 MiB": ([40, ~0, 20, 70], EXPANDABLE, (90, 100, 100, None)),
    # 2 + 20 MiB are cached, and 100 MiB only fit when both are gone.
    "small segments are given back too": ([BYTE, 2, ~0, ~1, 100], {}, (100, 100, 100, None)),
    # The free page in front of the block in use is unmapped and mapped again behind it.
    "expandable pages move to where they are needed": ([20, 20, 20, ~0, ~2, 80], EXPANDABLE, (100, 100, 100, None)),
    # 98 MiB are 18 of the page and four new ones.
    "a page that is used in part stays, and its rest is used": ([2, 30, ~1, 98], EXPANDABLE, (100, 100, 100, None)),
    "one MiB more needs a sixth page": ([2, 30, ~1, 99], EXPANDABLE, (32, 40, 20, 3)),
    # Six of 1 MiB are three pages of 2; the first block and the last one keep theirs. 96 MiB are five pages of 20.
    "small pages go only when empty": ([1, 1, 1, 1, 1, 1, ~1, ~2, ~3, ~4, 96], EXPANDABLE, (6, 6, 4, 10)),
    # 41 MiB may take a block below 61 and cannot split one of 62, so that goes; the 30 MiB stay cached.
    "one block above the split size is given back, and no other": ([30, 62, ~0, ~1, 41], SPLIT_40, (92, 92, 72, None)),
    # 44 + 42 free enough for 60, and the 10 MiB in the third segment stay.
    "several such blocks, the largest first": ([44, 42, 10, ~0, ~1, ~2, 60], SPLIT_40, (96, 96, 70, None)),
    # 26 + 24 free enough for 50, and 22 stay.
    "blocks that make up the request exactly are enough": ([26, 24, 22, ~0, ~1, ~2, 50], SPLIT_20, (72, 72, 72, None)),
    "a block of the split size is one of them": ([40, 20, 18, ~0, ~1, ~2, 60], SPLIT_20, (78, 78, 78, None)),
    "half of the device is allowed": ([50], {"memory_fraction": 0.5}, (50, 50, 50, None)),
    "and no more": ([40, 20], {"memory_fraction": 0.5}, (40, 40, 40, 1)),
    "a fraction that is not reached changes nothing": ([40, ~0, 50], {"memory_fraction": 0.95}, (50, 90, 90, None)),
}


@pytest.mark.parametrize("name", LIMITED)
def test_scenarios_on_a_device_of_100_mib(name):
    steps, settings, (*sizes, out_of_memory_at) = LIMITED[name]
    result = replay(stream(*steps), settings=AllocatorSettings(**settings), capacity_bytes=100 * MIB)
    seen = result.allocated_peak_bytes, result.reserved_peak_bytes, result.reserved_end_bytes
    assert seen == tuple(size * MIB for size in sizes)
    assert result.out_of_memory_at == out_of_memory_at


def test_a_trim_gives_back_whole_segments_that_nothing_uses():
    events = [(0, 30 * MIB), (1, 6 * MIB), (2, 6 * MIB), (0, -1), (1, -1)]
    assert replay(events).reserved_end_bytes == 50 * MIB
    assert replay([*events, TRIM]).reserved_end_bytes == 20 * MIB
    assert replay([*events, TRIM, (3, 40 * MIB)]).reserved_peak_bytes == 60 * MIB


@pytest.mark.parametrize(("more", "left"), [((1, 30 * MIB), 0), ((1, 20 * MIB), 20), ((1, 512), 22)])
def test_a_trim_if_grown_waits_for_segments_of_large_blocks(more, left):
    events = [(0, 20 * MIB), (0, -1), TRIM_IF_GROWN, more, (1, -1), TRIM_IF_GROWN]
    assert replay(events).reserved_end_bytes == left * MIB
    assert replay([*events[:2], TRIM_IF_GROWN]).reserved_end_bytes == 20 * MIB  # nothing to compare with


def test_what_remains_at_the_end():
    result = replay(stream(3, 1000 * BYTE, ~0))
    assert result == Replayed(
        allocated_peak_bytes=3 * MIB + 1024,
        reserved_peak_bytes=22 * MIB,
        allocated_end_bytes=1024,
        reserved_end_bytes=22 * MIB,
        fragmentation_bytes=19 * MIB - 1024,
        segments=2,
        out_of_memory_at=None,
    )
    assert replay([]) == Replayed(0, 0, 0, 0, 0, 0, None)


def test_an_empty_tensor_has_no_block():
    assert replay([(1, 0), (1, 0), (2, 512)]) == replay([(2, 512)])


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([(7, 512), (7, 512)], "event 1 allocates block 7, which is live"),
        ([(7, -512)], "event 0 frees block 7, which is not live; begin with the blocks"),
        ([(7, 512), (7, -512), (7, -512)], "event 2 frees block 7"),
        ([(7, 0), (7, -512)], "event 1 frees block 7"),
    ],
)
def test_bad_events_are_named(events, message):
    with pytest.raises(ConfigError, match=message):
        replay(events)


def test_a_bad_capacity_is_named():
    assert replay([(1, 1)], capacity_bytes=1).out_of_memory_at == 0
    with pytest.raises(ConfigError, match=r"replay\(capacity_bytes=0\) must be at least 1"):
        replay([], capacity_bytes=0)


def test_all_values_out_of_range_are_named_at_once():
    with pytest.raises(ConfigError, match=r"(?s)max_split_size_bytes=1\).*memory_fraction=2"):
        AllocatorSettings(max_split_size_bytes=1, memory_fraction=2)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:False", {}),
        (
            " max_split_size_mb : 128 , expandable_segments:True",
            {"max_split_size_bytes": 128 * MIB, "expandable_segments": True},
        ),
        ("max_split_size_mb:20", {"max_split_size_bytes": 20 * MIB}),
        ("max_non_split_rounding_mb:30", {"max_non_split_rounding_bytes": 30 * MIB}),
        ("garbage_collection_threshold:0.6", {}),
        ("per_process_memory_fraction:0.5", {"memory_fraction": 0.5}),
        ("large_segment_size_mb:40", {"large_segment_bytes": 40 * MIB}),
        ("pinned_use_background_threads:True,backend:native,", {}),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": (4,) * 16}),
        ("roundup_power2_divisions:1", {"roundup_power2_divisions": (1,) * 16}),
        ("roundup_power2_divisions:[]", {"roundup_power2_divisions": (0,) * 16}),
        ("roundup_power2_divisions:[4:2,16:8,>:4]", {"roundup_power2_divisions": (2, 2, 2, 0, 8, *(4,) * 11)}),
        (
            "roundup_power2_divisions:[1:2,2:4],max_split_size_mb:50",
            {"roundup_power2_divisions": (2, 4, *(0,) * 14), "max_split_size_bytes": 50 * MIB},
        ),
    ],
)
def test_settings_are_read_from_the_environment_variable(text, fields):
    assert AllocatorSettings.from_env(text) == AllocatorSettings(**fields)


BAD = {
    "expandable_segments:true": "expandable_segments takes True or False",
    "max_split_size_mb:5": "must be None or at least 20 MiB",
    "max_split_size_mb": "max_split_size_mb takes a whole number of MiB",
    "max_split_size_mb:1.5": "max_split_size_mb takes a whole number of MiB",
    "max_non_split_rounding_mb:19": "must be at least 20 MiB",
    "large_segment_size_mb:10": "must be over 10 MiB",
    "roundup_power2_divisions:3": "each 0 or a power of two",
    "roundup_power2_divisions:0": "takes a power of two, or a list",
    "roundup_power2_divisions:[300:1]": "whose sizes in MiB are powers of two",
    "roundup_power2_divisions:[256:3]": "each 0 or a power of two",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_settings_are_named(text):
    with pytest.raises(ConfigError, match=BAD[text]):
        AllocatorSettings.from_env(text)


def test_the_drivers_allocator_is_not_replayed():
    with pytest.raises(ConfigError, match="only backend:native can be replayed"):
        AllocatorSettings.from_env("backend:cudaMallocAsync")


@pytest.fixture
def torch_settings():
    if torch.cuda.is_available():
        pytest.skip("would change the settings of the CUDA allocator in use")
    yield torch._C._accelerator_setAllocatorSettings
    for text in ("large_segment_size_mb:20", "max_non_split_rounding_mb:20", ""):
        with contextlib.suppress(ValueError):  # some releases have no such setting, and then nothing to put back
            torch._C._accelerator_setAllocatorSettings(text)


@pytest.mark.parametrize("text", BAD)
def test_pytorch_refuses_the_same_settings(text, torch_settings):
    with pytest.raises((ValueError, RuntimeError)):
        torch_settings(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[]",
        "roundup_power2_divisions:[>:4]",
        "roundup_power2_divisions:[1:2,64:8]",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "roundup_power2_divisions:[512:2,256:4]",
        "roundup_power2_divisions:[131072:16,>:2]",
    ],
)
def test_pytorch_reads_the_same_divisions(text, torch_settings):
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    symbol = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    if not hasattr(library, symbol):
        pytest.skip("this PyTorch does not export AcceleratorAllocatorConfig::roundup_power2_divisions")
    divisions = getattr(library, symbol)
    divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    torch_settings(text)
    ours = AllocatorSettings.from_env(text).roundup_power2_divisions or (0,) * 16
    assert ours == tuple(divisions(MIB << power) for power in range(16))
    assert (divisions(1), divisions(1 << 40)) == (ours[0], ours[15])


SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 20 * MIB, 64 * MIB]),
    roundup_power2_divisions=st.sampled_from([(), (4,) * 16]),
    memory_fraction=st.sampled_from([1.0, 0.8]),
)
SIZES = st.one_of(st.integers(1, 3 * KIB), st.integers(1, 2 * MIB), st.integers(1, 60 * MIB))


@given(
    settings=SETTINGS,
    capacity=st.sampled_from([None, 100 * MIB, 300 * MIB]),
    steps=st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 99)), max_size=60),
)
def test_every_byte_is_accounted_for(settings, capacity, steps):
    events, sizes, streams = [], {}, {}
    for index, (frees, nbytes, choice) in enumerate(steps):
        if frees and sizes:
            name = sorted(sizes)[choice % len(sizes)]
            events.append((name, -sizes.pop(name)))
        else:
            sizes[index], streams[index] = nbytes, choice % 2
            events.append((index, nbytes))
    options = {"settings": settings, "capacity_bytes": capacity, "streams": streams}
    result = replay(events, **options)
    if result.out_of_memory_at is not None:
        events = events[: result.out_of_memory_at]
        sizes = {name: nbytes for name, nbytes in dict(events).items() if nbytes > 0}
        result = replay(events, **options)
    assert result == replay(iter(events), **options)
    assert all(result.block_bytes[name] >= settings.rounded_bytes(nbytes) >= nbytes for name, nbytes in sizes.items())
    assert sum(result.block_bytes[name] for name in sizes) == result.allocated_end_bytes
    assert result.allocated_end_bytes <= result.allocated_peak_bytes <= result.reserved_peak_bytes
    assert result.allocated_end_bytes <= result.reserved_end_bytes <= result.reserved_peak_bytes
    assert capacity is None or result.reserved_peak_bytes <= int(settings.memory_fraction * capacity)
    assert 0 <= result.fragmentation_bytes <= result.reserved_peak_bytes
    freed = replay([*events, *((name, -nbytes) for name, nbytes in sizes.items()), TRIM], **options)
    assert (freed.allocated_end_bytes, freed.reserved_end_bytes) == (0, 0), "all parts of a segment have merged again"


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:torch.cuda._set_allocator_settings is deprecated:FutureWarning")
@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:8"])
@pytest.mark.parametrize("seed", range(5))
def test_a_replay_of_a_full_device_gives_back_and_fails_where_the_allocator_does(text, seed):
    """Cached segments go before an allocation fails, and when the caller asks for it; what fails, fails."""
    choose, total = random.Random(seed), torch.cuda.get_device_properties(0).total_memory
    live: dict[int, torch.Tensor] = {}
    fraction = 400 * MIB / total
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(text)
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        if (before := torch.cuda.memory_reserved()) != 0:
            pytest.skip(f"earlier tests hold {before} bytes on the device, and their free space would be used")
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        events, failed = [], None
        for index in range(1000):
            if choose.random() < 0.02:
                torch.cuda.empty_cache()
                events.append(TRIM)
            elif live and choose.random() < 0.47:
                name = choose.choice(sorted(live))
                del live[name]
                events.append((name, -1))
            else:
                events.append((index, int(2 ** choose.uniform(10, 26))))
                try:
                    live[index] = torch.empty(events[-1][1], dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError:
                    failed = len(events) - 1
                    break
        settings = dataclasses.replace(AllocatorSettings.from_env(text), memory_fraction=fraction)
        result = replay(events, settings=settings, capacity_bytes=total)
        assert result.out_of_memory_at == failed
        assert result.allocated_peak_bytes == torch.cuda.max_memory_allocated()
        assert result.retries == torch.cuda.memory_stats()["num_alloc_retries"]
        assert result.retries > 0
        assert abs(result.reserved_peak_bytes / torch.cuda.max_memory_reserved() - 1) <= 0.01
    finally:
        live.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.cuda.empty_cache()


def test_a_stream_keeps_what_it_has_cached():
    events = [(1, 30 * MIB), (1, -30 * MIB), (2, 30 * MIB)]
    assert replay(events).reserved_peak_bytes == 30 * MIB
    apart = replay(events, streams={2: 1})
    assert (apart.reserved_peak_bytes, apart.segments) == (60 * MIB, 2)
    # Until the device is full, when all streams give back theirs.
    full = replay(events, streams={2: 1}, capacity_bytes=40 * MIB)
    assert (full.out_of_memory_at, full.retries) == (None, 1)


@pytest.mark.parametrize(("release", "older_first"), [((2, 11), False), ((2, 12), True)])
def test_of_two_free_blocks_of_one_size_the_release_decides(release, older_first):
    """Segments of 24 and 64 MiB have 4 MiB left each, and 2 are taken from one of them."""
    older, newer = (4, 20), (5, 60)
    taken = [(1, 24), (2, 64), (1, -1), older, (2, -1), newer, (6, 2)]

    def reserved(freed):
        """With a request for the 4 MiB and the block beside them, which has room only where nothing was taken."""
        name, size = freed
        events = [*taken, (name, -1), (7, size + 4)]
        return replay([(each, mib * MIB) for each, mib in events], torch_version=release).reserved_peak_bytes // MIB

    whole, cut = (newer, older) if older_first else (older, newer)
    assert reserved(whole) == 24 + 64
    assert reserved(cut) == 24 + 64 + cut[1] + 4
