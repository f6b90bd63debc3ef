/* Tells the record of calls (queues.c) when PyTorch's caching allocator hands out a block, and when a block is given back.
 *
 * PyTorch's hooks for sanitizers (torch.cuda._gpu_trace) tell the same to Python, and lose exceptions: a tensor that is
 * freed while an exception is on its way calls the hook, the import in front of the hook fails because an error is set,
 * and PyTorch drops both errors. The caller goes on as after a success, or ends with "error return without exception set".
 */
#include <c10/cuda/CUDACachingAllocator.h>

using c10::cuda::CUDACachingAllocator::TraceEntry;

extern "C" void ghost_note(int kind, void *stream, void *at, size_t size);

enum { HANDED_OUT = 32, GIVEN_BACK = 33 };

static void tell(const TraceEntry &entry) {
    void *block = reinterpret_cast<void *>(entry.addr_);
    if (entry.action_ == TraceEntry::ALLOC) ghost_note(HANDED_OUT, entry.stream_, block, entry.size_);
    if (entry.action_ == TraceEntry::FREE_REQUESTED) ghost_note(GIVEN_BACK, nullptr, block, 0);
}

/* Once per process, after the allocator has been initialised: a tracker is never taken away. */
extern "C" void ghost_follow_allocator(void) {
    static const bool follows = (c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(tell), true);
    (void)follows;
}
