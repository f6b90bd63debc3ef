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


def stream(*steps):
    """Events from a shorthand: a number allocates the next id, ``~id`` frees it. Ids count from 0."""
    events = []
    for step in steps:
        if step < 0:
            events.append((~step, -1))
        else:
            events.append((sum(nbytes > 0 for _, nbytes in events), step))
    return events


def summary(result):
    return (
        result.allocated_peak_bytes,
        result.reserved_peak_bytes,
        result.fragmentation_bytes,
        result.segments,
        result.out_of_memory_at,
    )


# Worked out by hand from the rules of CUDACachingAllocator.cpp.
SCENARIOS = {
    "one byte is a block of 512 in a small segment of 2 MiB": ([1], {}, (512, 2 * MIB, 2 * MIB - 512, 1, None)),
    "sizes round up to 512": ([513], {}, (1024, 2 * MIB, 2 * MIB - 1024, 1, None)),
    "1 MiB is the largest small request": ([MIB, MIB], {}, (2 * MIB, 2 * MIB, MIB, 1, None)),
    "one byte more is large and shares 20 MiB": (
        [MIB + 1],
        {},
        (MIB + 512, 20 * MIB, 19 * MIB - 512, 1, None),
    ),
    "requests below 10 MiB share 20 MiB": ([9 * MIB, 9 * MIB], {}, (18 * MIB, 20 * MIB, 11 * MIB, 1, None)),
    "from 10 MiB on a request has its own segment": ([10 * MIB], {}, (10 * MIB, 10 * MIB, 0, 1, None)),
    "segments round up to 2 MiB and a remainder above 1 MiB is split off": (
        [10 * MIB + 512],
        {},
        (10 * MIB + 512, 12 * MIB, 2 * MIB - 512, 1, None),
    ),
    "a remainder of 1 MiB stays in the block and counts as allocated": (
        [11 * MIB],
        {},
        (12 * MIB, 12 * MIB, 0, 1, None),
    ),
    "a cached block is used again": (
        [12 * MIB, ~0, 12 * MIB],
        {},
        (12 * MIB, 12 * MIB, 0, 1, None),
    ),
    "the smallest cached block that fits is taken": (
        # 30 and 14 MiB are free; 13 goes to 14 and leaves it whole, and 30 still serves the last request.
        [30 * MIB, 14 * MIB, ~0, ~1, 13 * MIB, 30 * MIB],
        {},
        (44 * MIB, 44 * MIB, 0, 2, None),
    ),
    "a freed block merges with both neighbours": (
        # Three of 6 MiB fill 18 of 20; freed in the order 0, 2, 1 they and the tail are one block again.
        [6 * MIB, 6 * MIB, 6 * MIB, ~0, ~2, ~1, 20 * MIB],
        {},
        (20 * MIB, 20 * MIB, 14 * MIB, 1, None),
    ),
    "a block in use keeps its neighbours apart": (
        # 6 and 8 MiB are free around the middle one, which is not enough for 14.
        [6 * MIB, 6 * MIB, 6 * MIB, ~0, ~2, 14 * MIB],
        {},
        (20 * MIB, 34 * MIB, 14 * MIB, 2, None),
    ),
    "small and large pools do not mix": (
        [MIB, MIB, ~0, ~1, 2 * MIB],
        {},
        (2 * MIB, 22 * MIB, 20 * MIB, 2, None),
    ),
    "a shorter sequence leaves its segments behind": (
        [30 * MIB, ~0, 32 * MIB],
        {},
        (32 * MIB, 62 * MIB, 30 * MIB, 2, None),
    ),
    "an expandable segment grows in pages of 20 MiB": (
        [30 * MIB, ~0, 32 * MIB],
        {"expandable_segments": True},
        (32 * MIB, 40 * MIB, 10 * MIB, 1, None),
    ),
    "an expandable segment splits off every remainder": (
        [11 * MIB],
        {"expandable_segments": True},
        (11 * MIB, 20 * MIB, 9 * MIB, 1, None),
    ),
    "the small pool expands in pages of 2 MiB": (
        [MIB, MIB, MIB],
        {"expandable_segments": True},
        (3 * MIB, 4 * MIB, MIB, 1, None),
    ),
    "a remainder of 512 bytes is a small block": ([MIB, MIB - 512, 512], {}, (2 * MIB, 2 * MIB, MIB, 1, None)),
    "an expandable segment tries no larger block than it must": (
        # Free are 8 MiB at the end, which can grow, 20 and 30: 5 MiB come from the 20, and 30 find the 30 untouched.
        [20 * MIB, 2 * MIB, 30 * MIB, ~0, ~2, 5 * MIB, 30 * MIB],
        {"expandable_segments": True},
        (52 * MIB, 60 * MIB, 8 * MIB, 1, None),
    ),
    "an expandable segment prefers the block that grows least": (
        # Free are 20 MiB in front of the block in use and 10 MiB at the end, which can grow without limit and so
        # counts as larger: the second request takes the 20.
        [20 * MIB, 10 * MIB, ~0, 5 * MIB, 20 * MIB],
        {"expandable_segments": True},
        (35 * MIB, 60 * MIB, 25 * MIB, 1, None),
    ),
    "an oversize block serves no smaller request": (
        [60 * MIB, ~0, 30 * MIB],
        {"max_split_size_bytes": 40 * MIB},
        (60 * MIB, 90 * MIB, 60 * MIB, 2, None),
    ),
    "a block of the split size is oversize": (
        [40 * MIB, ~0, 30 * MIB],
        {"max_split_size_bytes": 40 * MIB},
        (40 * MIB, 70 * MIB, 40 * MIB, 2, None),
    ),
    "an oversize block serves a request that is less than 20 MiB smaller, unsplit": (
        [60 * MIB, ~0, 41 * MIB],
        {"max_split_size_bytes": 40 * MIB},
        (60 * MIB, 60 * MIB, 0, 1, None),
    ),
    "20 MiB smaller is too small": (
        [60 * MIB, ~0, 40 * MIB],
        {"max_split_size_bytes": 40 * MIB},
        (60 * MIB, 100 * MIB, 60 * MIB, 2, None),
    ),
    "40 MiB of rounding allow it": (
        [60 * MIB, ~0, 40 * MIB],
        {"max_split_size_bytes": 40 * MIB, "max_non_split_rounding_bytes": 40 * MIB},
        (60 * MIB, 60 * MIB, 0, 1, None),
    ),
    "a larger shared segment": ([3 * MIB], {"large_segment_bytes": 64 * MIB}, (3 * MIB, 64 * MIB, 61 * MIB, 1, None)),
    "powers of two in four steps": (
        [1200 * KIB],
        {"roundup_power2_divisions": (4,) * 16},
        (1280 * KIB, 20 * MIB, 20 * MIB - 1280 * KIB, 1, None),
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(name):
    steps, settings, expected = SCENARIOS[name]
    assert summary(replay(stream(*steps), settings=AllocatorSettings(**settings))) == expected


# The last number is what stays reserved.
LIMITED = {
    "nothing to give back": ([60 * MIB, 60 * MIB], {}, (60 * MIB, 60 * MIB, 0, 1, 1), 60 * MIB),
    "a cached segment is given back for a new one": (
        [60 * MIB, ~0, 70 * MIB],
        {},
        (70 * MIB, 70 * MIB, 0, 1, None),
        70 * MIB,
    ),
    "a segment with a block in use is not": (
        # 20 of 40 MiB are in use, and the other 20 of no use to a request of 70.
        [40 * MIB, ~0, 20 * MIB, 70 * MIB],
        {},
        (40 * MIB, 40 * MIB, 0, 1, 3),
        40 * MIB,
    ),
    "an expandable segment puts the free 20 MiB in front of 50 new ones, in 3 pages": (
        [40 * MIB, ~0, 20 * MIB, 70 * MIB],
        {"expandable_segments": True},
        (90 * MIB, 100 * MIB, 10 * MIB, 1, None),
        100 * MIB,
    ),
    "small segments are given back too": (
        # 2 + 20 MiB are cached, and 100 MiB only fit when both are gone.
        [1, 2 * MIB, ~0, ~1, 100 * MIB],
        {},
        (100 * MIB, 100 * MIB, 0, 1, None),
        100 * MIB,
    ),
    "expandable pages move to where they are needed": (
        # The free page in front of the block in use is unmapped and mapped again behind it.
        [20 * MIB, 20 * MIB, 20 * MIB, ~0, ~2, 80 * MIB],
        {"expandable_segments": True},
        (100 * MIB, 100 * MIB, 0, 1, None),
        100 * MIB,
    ),
    "a page that is used in part stays, and its rest is used": (
        # 98 MiB are 18 of the page and four new ones.
        [2 * MIB, 30 * MIB, ~1, 98 * MIB],
        {"expandable_segments": True},
        (100 * MIB, 100 * MIB, 0, 1, None),
        100 * MIB,
    ),
    "one MiB more needs a sixth page": (
        [2 * MIB, 30 * MIB, ~1, 99 * MIB],
        {"expandable_segments": True},
        (32 * MIB, 40 * MIB, 8 * MIB, 1, 3),
        20 * MIB,
    ),
    "of the small pool's pages too only the empty ones are given back": (
        # Six of 1 MiB are three pages of 2; the first block and the last one keep theirs. 96 MiB are five pages of 20.
        [MIB, MIB, MIB, MIB, MIB, MIB, ~1, ~2, ~3, ~4, 96 * MIB],
        {"expandable_segments": True},
        (6 * MIB, 6 * MIB, MIB, 1, 10),
        4 * MIB,
    ),
    "one block above the split size is given back, and no other": (
        # 41 MiB may take a block below 61 and cannot split one of 62, so that goes; the 30 MiB stay cached.
        [30 * MIB, 62 * MIB, ~0, ~1, 41 * MIB],
        {"max_split_size_bytes": 40 * MIB},
        (92 * MIB, 92 * MIB, 0, 2, None),
        72 * MIB,
    ),
    "several blocks above the split size, the largest first, until they make up the request": (
        # 44 + 42 free enough for 60, and the 10 MiB in the third segment stay.
        [44 * MIB, 42 * MIB, 10 * MIB, ~0, ~1, ~2, 60 * MIB],
        {"max_split_size_bytes": 40 * MIB},
        (96 * MIB, 96 * MIB, 0, 3, None),
        70 * MIB,
    ),
    "blocks that make up the request exactly are enough": (
        # 26 + 24 free enough for 50, and 22 stay.
        [26 * MIB, 24 * MIB, 22 * MIB, ~0, ~1, ~2, 50 * MIB],
        {"max_split_size_bytes": 20 * MIB},
        (72 * MIB, 72 * MIB, 0, 3, None),
        72 * MIB,
    ),
    "a block of the split size is one of them": (
        [40 * MIB, 20 * MIB, 18 * MIB, ~0, ~1, ~2, 60 * MIB],
        {"max_split_size_bytes": 20 * MIB},
        (78 * MIB, 78 * MIB, 0, 3, None),
        78 * MIB,
    ),
    "half of the device is allowed": ([50 * MIB], {"memory_fraction": 0.5}, (50 * MIB, 50 * MIB, 0, 1, None), 50 * MIB),
    "and no more": (
        [40 * MIB, 20 * MIB],
        {"memory_fraction": 0.5},
        (40 * MIB, 40 * MIB, 0, 1, 1),
        40 * MIB,
    ),
    "a fraction alone collects nothing": (
        [40 * MIB, ~0, 50 * MIB],
        {"memory_fraction": 0.95},
        (50 * MIB, 90 * MIB, 40 * MIB, 2, None),
        90 * MIB,
    ),
    "collection frees the block that was cached longest": (
        # Of 90 MiB allowed 74 are taken when 28 more are asked for, above the threshold of 72. The two cached blocks
        # of 24 MiB were free for two requests and for one: the first is above the mean age and goes.
        [24 * MIB, 24 * MIB, ~0, 26 * MIB, ~1, 28 * MIB],
        {"memory_fraction": 0.9, "garbage_collection_threshold": 0.8},
        (54 * MIB, 78 * MIB, 24 * MIB, 3, None),
        78 * MIB,
    ),
    "collection goes on below the mean age until it is enough": (
        # The same with a threshold of 45: the first block is 24 of the 29 MiB above it, so the second goes too.
        [24 * MIB, 20 * MIB, ~0, 26 * MIB, ~1, 28 * MIB],
        {"memory_fraction": 0.9, "garbage_collection_threshold": 0.5},
        (54 * MIB, 70 * MIB, 24 * MIB, 3, None),
        54 * MIB,
    ),
    "collection stops when it is enough": (
        # The same with a threshold of 46.
        [24 * MIB, 20 * MIB, ~0, 26 * MIB, ~1, 28 * MIB],
        {"memory_fraction": 0.92, "garbage_collection_threshold": 0.5},
        (54 * MIB, 74 * MIB, 20 * MIB, 3, None),
        74 * MIB,
    ),
    "collection needs a memory fraction": (
        [40 * MIB, ~0, 50 * MIB],
        {"garbage_collection_threshold": 0.1},
        (50 * MIB, 90 * MIB, 40 * MIB, 2, None),
        90 * MIB,
    ),
}


@pytest.mark.parametrize("name", LIMITED)
def test_scenarios_on_a_device_of_100_mib(name):
    steps, settings, expected, reserved_end_bytes = LIMITED[name]
    result = replay(stream(*steps), settings=AllocatorSettings(**settings), capacity_bytes=100 * MIB)
    assert summary(result) == expected
    assert result.reserved_end_bytes == reserved_end_bytes


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
    result = replay(stream(3 * MIB, 1000, ~0))
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
        ("garbage_collection_threshold:0.6", {"garbage_collection_threshold": 0.6}),
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
    "garbage_collection_threshold:0": "takes a number between 0 and 1",
    "garbage_collection_threshold:1.0": "takes a number between 0 and 1",
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
    garbage_collection_threshold=st.sampled_from([0.0, 0.3]),
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
def test_the_replay_is_what_the_allocator_does(text):
    choose = random.Random(0)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(text)
    try:
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        if before != (0, 0):
            pytest.skip(f"earlier tests hold {before} bytes on the device, and their free space would be used")
        torch.cuda.reset_peak_memory_stats()
        live, events, seen = {}, [], []
        for index in range(2000):
            if live and choose.random() < 0.5:
                name = choose.choice(sorted(live))
                del live[name]
                events.append((name, -1))
            else:
                nbytes = int(2 ** choose.uniform(0, 26))
                live[index] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                events.append((index, nbytes))
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        result = replay(events, settings=AllocatorSettings.from_env(text))
        assert result.allocated_peak_bytes == torch.cuda.max_memory_allocated()
        assert result.allocated_end_bytes == seen[-1][0]
        # The driver chooses the segments' addresses, which decide between free blocks of one size.
        assert abs(result.reserved_peak_bytes / torch.cuda.max_memory_reserved() - 1) <= 0.01
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.cuda.empty_cache()


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
