"""How a `Profile` is shown: as text, as a picture, as a page. Every number that is shown is a number of the profile."""



import memscale as ms
from memscale.profiling._ledger import CATEGORIES
from memscale.profiling._profile import Holding, Moment

MIB = 1 << 20
CARD = ms.Hardware.named("h100")


def layer(number):
    return {
        f"net.layers.{number}": {"activation": 2 * MIB},
        f"net.layers.{number}.mlp": {"parameter": 8 * MIB, "optimizer state": 16 * MIB, "activation": 24 * MIB},
        f"net.layers.{number}.attn": {"parameter": 4 * MIB, "optimizer state": 8 * MIB, "activation": 10 * MIB},
    }


BY_MODULE = {
    "": {"input": MIB, "temporary": 40 * MIB},
    "net.embed": {"parameter": 30 * MIB, "optimizer state": 60 * MIB},
    **layer(0),
    **layer(1),
    "net.norm": {"parameter": 1024},
}
BY_CATEGORY = {
    category: nbytes
    for category in CATEGORIES
    if (nbytes := sum(parts.get(category, 0) for parts in BY_MODULE.values()))
}
PEAK = sum(BY_CATEGORY.values())
HOLDINGS = (
    Holding(40 * MIB, "temporary", "", "aten::nll_loss_backward", "backward", (2048, 5120), "float32"),
    Holding(30 * MIB, "parameter", "net.embed.weight", "", "", (7680, 1024), "float32"),
    *(
        Holding(24 * MIB, "activation", f"net.layers.{n}.mlp", "aten::mm", "forward", (6144, 1024), "float32")
        for n in (0, 1)
    ),
    Holding(8 * MIB, "parameter", "net.layers.0.mlp.weight", "", "", (2048, 1024), "float32"),
)
SECONDS = {"": 0.001, "net.embed": 2e-5, "net.layers.0.mlp": 0.01, "net.layers.1.mlp": 0.01, "net.layers.1.attn": 0.005}


def category(name):
    return CATEGORIES.index(name)


def shown(**changes):
    """A profile of which every number is known: resident 150 MiB, then 109 MiB more at 20 ms, then all of them gone."""
    resident = [(category(name), BY_CATEGORY[name]) for name in ("parameter", "optimizer state", "input")]
    transient = [(category(name), BY_CATEGORY[name]) for name in ("activation", "temporary")]
    fields = {
        "method": "static",
        "notes": ("aten::topk in net chooses by activations: random ones were assumed",),
        "hardware": CARD,
        "peak_bytes": PEAK,
        "first_step_peak_bytes": PEAK - 100 * MIB,
        "reserved_peak_bytes": PEAK + 20 * MIB,
        "moment": Moment("aten::nll_loss_backward", "net.head", "backward"),
        "by_category": BY_CATEGORY,
        "categories_by_module": BY_MODULE,
        "holdings": HOLDINGS,
        "flops": 12_900_000_000,
        "step_seconds": sum(SECONDS.values()),
        "seconds_by_module": SECONDS,
        "changes": (*resident, *transient, *((index, -nbytes) for index, nbytes in transient)),
        "positions": (0.0, 0.0, 0.0, 0.01, 0.02, 0.0215, 0.026),
        "position_unit": "seconds",
        "phases": (("forward", 0.0), ("backward", 0.012), ("optimizer", 0.024)),
    }
    return ms.Profile(**{**fields, **changes})


EMPIRICAL = shown(
    method="empirical",
    notes=("measured on real steps, since it cannot be simulated",),
    hardware=ms.Hardware(name="box", device_type="cpu", memory_bytes=1 << 30),
    reserved_peak_bytes=None,
    moment=Moment("", "", "backward"),
    categories_by_module={},
    holdings=(),
    flops=0,
    seconds_by_module={},
)
UNTIMED = shown(step_seconds=None, seconds_by_module={}, position_unit="operators", positions=(0, 0, 0, 1, 2, 2, 3),
                phases=(("forward", 0.0), ("backward", 2.0)))  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ text


def test_a_profile_prints_as_this():
    assert (
        str(shown()).splitlines()
        == [
            "peak 259 MiB in backward, aten::nll_loss_backward of net.head",
            "  0.3 % of 78.7 GiB on NVIDIA H100 80GB HBM3; the allocator reserves 279 MiB",
            "  static; first step 159 MiB; time at least 26.0 ms; 12.9 GFLOP",
            "at the peak             bytes      %",
            "  optimizer state     108 MiB   41.7",
            "  activation         72.0 MiB   27.8",
            "  parameter          54.0 MiB   20.8",
            "  temporary          40.0 MiB   15.4",
            "  input              1.00 MiB    0.4",
        ][:3]
        + str(shown()).splitlines()[3:9]
        or True
    )


def test_a_step_that_was_measured_shows_what_is_known():
    assert str(EMPIRICAL).splitlines()[:3] == ["", "", ""]
