/* Streams and events, and a record of the calls that order memory. Part of cudart.c.
 *
 * What a stream is given happens at once. With a delay (GHOST_DELAY, or `ghost_delay`: a seed, 0 for none) it happens when
 * its turn comes, which chance decides, or when somebody waits for it: a copy that nobody waits for may never come. A
 * kernel does nothing, at whatever time.
 *
 * With a clock (`ghost_clock`) it is done at once, too, and passes for done when its time has come: copies take what their
 * bytes take on the link, one after the other in each direction, and kernels what `ghost_work` says. The time is that of
 * a host which goes on by what it is said to take, and as far as it waits.
 *
 * `ghost_record(1)` begins a record, `ghost_calls` reads it, `ghost_note` adds to it what no call of CUDA's tells: which
 * memory a kernel is given, and when the caching allocator hands out a block.
 */

typedef struct { int64_t kind, stream, to, from, size, thread; } Call;

static pthread_mutex_t queue_lock;
static pthread_once_t queue_once = PTHREAD_ONCE_INIT;
static Call *calls;
static size_t call_count, call_room;
static int recording;
static uint64_t chance; /* 0: nothing is delayed */

static void make_queue_lock(void) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&queue_lock, &kind);
    chance = from_env("GHOST_DELAY", 0);
}
static void begin(void) { pthread_once(&queue_once, make_queue_lock); pthread_mutex_lock(&queue_lock); }
static cudaError_t over(cudaError_t error) { pthread_mutex_unlock(&queue_lock); return error; }

static void tell(int kind, const void *stream, const void *to, const void *from, size_t size) {
    if (!recording) return;
    begin();
    if (call_count == call_room) calls = realloc(calls, (call_room = call_room ? 2 * call_room : 4096) * sizeof *calls);
    calls[call_count++] = (Call){kind, (int64_t)stream, (int64_t)to, (int64_t)from, (int64_t)size, (int64_t)pthread_self()};
    over(cudaSuccess);
}
void ghost_record(int on) { begin(); recording = on; if (on) call_count = 0; over(cudaSuccess); }
size_t ghost_calls(Call **out) { *out = calls; return call_count; }
void ghost_note(int kind, void *stream, void *at, size_t size) { tell(kind, stream, at, NULL, size); }

/* ---- queues ------------------------------------------------------------------------------------------------ */

typedef struct Stream Stream;
typedef struct { struct timespec at; unsigned asked, passed; Stream *on; double due; } Event; /* how often it was recorded, and done */
typedef struct Job {
    int kind; /* CALL_COPY, CALL_FILL, CALL_RECORD or CALL_WAIT */
    char *to;
    const char *from;
    size_t size, to_pitch, from_pitch, rows;
    int how; /* the kind of a copy, or the value to fill with */
    Event *event;
    unsigned time;
    struct Job *next;
} Job;
struct Stream { int priority, capturing; Job *first, **last; Stream *next; double end; };

#define MOST_QUEUED 1024
static struct { int on; double now, copy_seconds, bytes_per_second[2], link_ends[2], ends[MOST_QUEUED]; unsigned launches; pthread_t by; } timed;
static double later(double a, double b) { return a > b ? a : b; }
/* The host is the thread that launches: autograd's for the CPU waits for gradients while that goes on. */
static void wait_until(double end) { if (pthread_equal(timed.by, pthread_self())) timed.now = later(timed.now, end); }

static Stream defaults[4], *streams; /* 0, and the handles that mean the default stream */
static int stream_count;
static Stream *stream_of(cudaStream_t handle) { return (uintptr_t)handle < 4 ? &defaults[0] : (Stream *)handle; }
static int is_real(cudaStream_t stream) { return (uintptr_t)stream > 16; }
static void enlist(Stream *stream) { stream->last = &stream->first; stream->next = streams; streams = stream; stream_count++; }

static void done(const Job *job) {
    if (job->kind == CALL_COPY) {
        for (size_t row = 0; row < job->rows; row++)
            if (job->size * job->rows <= copy_bytes || job->how == cudaMemcpyHostToHost)
                memmove(job->to + row * job->to_pitch, job->from + row * job->from_pitch, job->size);
    } else if (job->kind == CALL_FILL) {
        if (job->size <= copy_bytes) memset(job->to, job->how, job->size);
    } else if (job->kind == CALL_RECORD) {
        clock_gettime(CLOCK_MONOTONIC, &job->event->at);
        job->event->passed = job->time;
    }
}
static void reach(Event *event, unsigned time);
static int is_blocked(const Stream *stream) {
    return stream->first->kind == CALL_WAIT && stream->first->event->passed < stream->first->time;
}
static void step(Stream *stream) { /* the first job, and whatever that has to wait for */
    Job *job = stream->first;
    if (job->kind == CALL_WAIT) reach(job->event, job->time);
    done(job);
    stream->first = job->next;
    if (!stream->first) stream->last = &stream->first;
    free(job);
}
static void drain(Stream *stream) { while (stream->first) step(stream); wait_until(stream->end); }
static void drain_all(void) { for (Stream *stream = streams; stream; stream = stream->next) drain(stream); }
static void reach(Event *event, unsigned time) { while (event->passed < time) step(event->on); }

static unsigned choose(unsigned n) { /* xorshift */
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return (unsigned)((chance >> 11) % n);
}
static void let_time_pass(void) {
    while (chance && stream_count && choose(4) == 0) {
        Stream *stream = streams;
        for (unsigned skip = choose((unsigned)stream_count); skip; skip--) stream = stream->next;
        if (stream->first && !is_blocked(stream)) step(stream);
    }
}
static void take_time(Stream *stream, Job job) {
    int back = job.how == cudaMemcpyHostToDevice;
    if (job.kind == CALL_COPY && (back || job.how == cudaMemcpyDeviceToHost)) {
        timed.now += timed.copy_seconds;
        double begin = later(later(timed.now, stream->end), timed.link_ends[back]);
        stream->end = timed.link_ends[back] = begin + 5e-6 + (double)(job.size * job.rows) / timed.bytes_per_second[back];
    } else if (job.kind == CALL_RECORD) job.event->due = later(stream->end, timed.now);
    else if (job.kind == CALL_WAIT) stream->end = later(stream->end, job.event->due);
}
static void put(cudaStream_t handle, Job job) {
    Stream *stream = stream_of(handle);
    if (!stream->last) enlist(stream);
    if (timed.on) { take_time(stream, job); done(&job); return; }
    if (!chance && !stream->first && !(job.kind == CALL_WAIT && job.event->passed < job.time)) { done(&job); return; }
    Job *queued = malloc(sizeof *queued);
    *queued = job;
    queued->next = NULL;
    *stream->last = queued;
    stream->last = &queued->next;
    let_time_pass();
}
/* From here on there is a clock, whose copies take the host and the link so long; with 0 bytes a second there is none. */
void ghost_clock(double copy_seconds, double out_bytes_per_second, double in_bytes_per_second) {
    begin();
    drain_all();
    timed.on = out_bytes_per_second > 0;
    timed.copy_seconds = copy_seconds;
    timed.bytes_per_second[0] = out_bytes_per_second;
    timed.bytes_per_second[1] = in_bytes_per_second;
    over(cudaSuccess);
}
/* The host has launched a kernel: what that took it, and what it takes the stream. A launch waits while many are queued. */
void ghost_work(void *handle, double host_seconds, double seconds) {
    Stream *stream = stream_of(handle);
    begin();
    if (!stream->last) enlist(stream);
    timed.now += host_seconds;
    if (seconds > 0) {
        timed.by = pthread_self();
        double *end = &timed.ends[timed.launches++ % MOST_QUEUED];
        wait_until(*end);
        *end = stream->end = later(stream->end, timed.now) + seconds;
    }
    over(cudaSuccess);
}
double ghost_now(void) { return timed.now; }
void ghost_delay(unsigned long long seed) { begin(); drain_all(); chance = seed; over(cudaSuccess); }

/* ---- copies ------------------------------------------------------------------------------------------------ */

static int is_pageable(const void *at) {
    pthread_mutex_lock(&lock);
    const Block *block = block_of(at);
    pthread_mutex_unlock(&lock);
    return !block;
}
/* CUDA copies from and to memory that is not pinned while the caller waits. */
static cudaError_t copied(cudaStream_t stream, Job job, int waits) {
    READY();
    begin();
    if (trace_copy) fprintf(stderr, "ghost: copy %zu kind %d\n", job.size * job.rows, job.how);
    if (job.kind == CALL_COPY) waits |= is_pageable(job.to) || is_pageable(job.from);
    const char *from = job.kind == CALL_COPY ? job.from : NULL;
    if (job.rows == 1) tell(job.kind, stream, job.to, from, job.size);
    else for (size_t row = 0; row < job.rows; row++)
        tell(job.kind, stream, job.to + row * job.to_pitch, job.from + row * job.from_pitch, job.size);
    put(stream, job);
    if (waits) { drain(stream_of(stream)); tell(CALL_STREAM_WAITED, stream, NULL, NULL, 0); }
    return over(cudaSuccess);
}
static Job copy_of(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return (Job){CALL_COPY, to, from, size, size, size, 1, kind};
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { return copied(NULL, copy_of(to, from, size, kind), 1); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) { return copied(stream, copy_of(to, from, size, kind), 0); }
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t stream) { return copied(stream, copy_of(to, from, size, cudaMemcpyDeviceToDevice), 0); }
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copied(stream, (Job){CALL_COPY, to, from, width, to_pitch, from_pitch, height, kind}, 0);
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) { return copied(stream, (Job){CALL_FILL, at, NULL, size, 0, 0, 1, value}, 0); }
cudaError_t cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size, NULL); }

/* ---- streams ----------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    Stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    begin();
    enlist(made);
    tell(CALL_STREAM, made, NULL, NULL, flags);
    *out = (cudaStream_t)made;
    return over(cudaSuccess);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = is_real(stream) ? ((Stream *)stream)->priority : 0; return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; } /* what it was given still happens */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
    Event *event = (Event *)handle;
    begin();
    tell(CALL_WAIT, stream, event, NULL, 0);
    put(stream, (Job){CALL_WAIT, NULL, NULL, 0, 0, 0, 0, 0, event, event->asked});
    return over(cudaSuccess);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    begin();
    drain(stream_of(stream));
    tell(CALL_STREAM_WAITED, stream, NULL, NULL, 0);
    return over(cudaSuccess);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    begin();
    let_time_pass();
    if (stream_of(stream)->first || stream_of(stream)->end > timed.now) return over(fail(cudaErrorNotReady));
    tell(CALL_STREAM_WAITED, stream, NULL, NULL, 0);
    return over(cudaSuccess);
}
static void wait_for_device(void) { begin(); timed.by = pthread_self(); drain_all(); tell(CALL_DEVICE_WAITED, NULL, NULL, NULL, 0); over(cudaSuccess); }
cudaError_t cudaDeviceSynchronize(void) { wait_for_device(); return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) { cudaStreamSynchronize(stream); call(stream, cudaSuccess, data); return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { cudaStreamSynchronize(stream); call(data); return cudaSuccess; }

/* ---- events ------------------------------------------------------------------------------------------------ */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { *event = (cudaEvent_t)calloc(1, sizeof(Event)); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; } /* streams may still wait for it; 40 bytes */
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    Event *event = (Event *)handle;
    begin();
    event->on = stream_of(stream);
    tell(CALL_RECORD, stream, event, NULL, 0);
    put(stream, (Job){CALL_RECORD, NULL, NULL, 0, 0, 0, 0, 0, event, ++event->asked});
    return over(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Event *event = (Event *)handle;
    begin();
    let_time_pass();
    if (event->passed < event->asked || event->due > timed.now) return over(fail(cudaErrorNotReady));
    tell(CALL_DONE, NULL, event, NULL, 0);
    return over(cudaSuccess);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    Event *event = (Event *)handle;
    begin();
    reach(event, event->asked);
    wait_until(event->due);
    tell(CALL_EVENT_WAITED, NULL, event, NULL, 0);
    return over(cudaSuccess);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    const Event *first = (Event *)start, *last = (Event *)end;
    if (first->passed < first->asked || last->passed < last->asked) return fail(cudaErrorNotReady);
    if (timed.on) { *ms = (float)((last->due - first->due) * 1e3); return cudaSuccess; }
    *ms = (float)((double)(last->at.tv_sec - first->at.tv_sec) * 1e3 + (double)(last->at.tv_nsec - first->at.tv_nsec) / 1e6);
    return cudaSuccess;
}
