"""Right numbers where programs look at them: small integer and bool tensors are computed on the host, in place.

The kernel of the device is called first, so the allocator sees what it would see; then the same operator runs on CPU
tensors over the same addresses, which are ordinary memory here. Masks, positions, lengths and counts are then right,
and what a model decides by them. Floating point numbers stay garbage. It changed no
peak by a byte where it was compared, but is a dispatch mode, and so only for models that need it: routers, lengths.
"""

import ctypes

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

LARGEST = 1 << 24


def not_packed():
    """Tell Hugging Face's models what they would find out: that their positions are those of one sequence a row."""
    import transformers.masking_utils as masks

    looks = masks.find_packed_sequence_indices

    def looks_in_vain(*args, **kwargs):
        looks(*args, **kwargs)

    masks.find_packed_sequence_indices = looks_in_vain


def float_masks_are_of_ones():
    """Tell them that masks in floating point, which they make themselves where the caller gives none, are of ones."""
    import transformers.masking_utils as masks

    prepare, of_ones = masks._preprocess_mask_arguments, False

    def prepared(config, inputs_embeds, attention_mask, *args, **kwargs):
        nonlocal of_ones
        of_ones = isinstance(attention_mask, torch.Tensor) and attention_mask.is_floating_point()
        return prepare(config, inputs_embeds, attention_mask, *args, **kwargs)

    def seen(ignores):
        def ignored(padding_mask, *args, **kwargs):
            if of_ones and padding_mask is not None:
                padding_mask.all()  # which takes memory
                padding_mask = None
            return ignores(padding_mask, *args, **kwargs)

        return ignored

    masks._preprocess_mask_arguments = prepared
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        setattr(masks, name, seen(getattr(masks, name)))


def compiled_kernels_do_nothing():
    """Let inductor write its code for the card, and allocate by it, without building the kernels of triton."""
    import torch._functorch.config
    import torch._inductor.config
    import triton.backends.nvidia.driver
    from torch._inductor.async_compile import AsyncCompile

    class Kernel:
        def run(self, *args, **kwargs):
            pass

    triton.backends.nvidia.driver.CudaUtils = object  # it loads kernels, by what the fake driver lacks
    AsyncCompile.triton = lambda self, *args, **kwargs: Kernel()
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False


def regions_compare_buffers():
    """Tell regions whether they changed a buffer in their first run: a comparison finds that all of them did."""
    from unittest import mock

    import memscale.regions.snapshot as snapshot

    same = snapshot.Snapshot._same

    def answered(self, group):
        tensor, old = group.tensors[0], group.old()
        if tensor.shape == old.shape and not snapshot.simulating():
            torch.equal(old, tensor)  # which takes memory
        with mock.patch.object(snapshot, "simulating", return_value=True):  # by what their modules are
            return same(self, group)

    snapshot.Snapshot._same = answered


def on_host(x):
    """A CPU tensor over the memory of a ghost tensor."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=x.dtype, count=storage.nbytes() // x.itemsize)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def is_whole(x):
    return not (x.is_floating_point() or x.is_complex())


class SmallIntegers(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        written = func._schema.is_mutable
        kept = None
        if (
            written
            and all(map(is_whole, before))
            and any(x.is_cuda for x in before)
            and sum(x.numel() for x in before) <= LARGEST
        ):
            kept = tree_map(lambda x: on_host(x) if isinstance(x, torch.Tensor) and x.is_cuda else x, (args, kwargs))
        out = func(*args, **kwargs)
        if func.is_view or "empty" in func._opname or torch.Tag.nondeterministic_seeded in func.tags:
            return out
        if kept is not None:
            func(*kept[0], **kept[1])
            return out
        results = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        if (
            written
            or not results
            or not all(x.is_cuda and is_whole(x) for x in results)
            or not all(map(is_whole, before))
        ):
            return out
        if sum(x.numel() for x in before + results) > LARGEST:
            return out

        def moved(x):
            if isinstance(x, torch.Tensor):
                return on_host(x) if x.is_cuda else x
            return torch.device("cpu") if isinstance(x, torch.device) else x

        with torch.utils._python_dispatch._disable_current_modes():
            host_args, host_kwargs = tree_map(moved, args), tree_map(moved, kwargs)
            try:
                real = func(*host_args, **host_kwargs)
            except NotImplementedError:  # such as histc of integers, which the device has and the host has not

                def double(x):
                    return x.double() if isinstance(x, torch.Tensor) else x

                real = func(*tree_map(double, host_args), **tree_map(double, host_kwargs))
            for x, y in zip(results, [y for y in tree_flatten(real)[0] if isinstance(y, torch.Tensor)], strict=False):
                if x.shape == y.shape:
                    on_host(x).copy_(y)
        return out
