/* The other libraries, one at a time: -DGHOST_CUBLAS, -DGHOST_CUDNN, ... What is missing, build_libraries.py adds as "return 0".
 *
 * Environment, since no public source says what the real libraries would ask for:
 *   GHOST_CUDNN_PLAN          workspace of a cuDNN plan (convolutions, attention), bytes (default 0)
 *   GHOST_CUDNN_CONV          1: the workspace of a convolution is as large as its three tensors, channel by channel 0
 *   GHOST_CUDNN_RNN_WORK      workspace of cuDNN's RNNs, bytes (default 0)
 *   GHOST_CUDNN_BN_WORK, GHOST_CUDNN_BN_RESERVE, GHOST_CUDNN_DROPOUT   likewise (default 0)
 *   GHOST_CUDNN_VERSION       what cudnnGetVersion says (default 92000)
 */
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

static inline size_t from_env(const char *name, size_t fallback) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : fallback;
}

#define __CUDA_FP16_H__ /* its contents need a compiler for CUDA */
#define __CUDA_BF16_H__

#ifdef GHOST_CUBLAS
#include "cublas_v2.h"
static __thread cublasPointerMode_t pointer_mode;
static __thread cublasMath_t math_mode;
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) { *mode = pointer_mode; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) { pointer_mode = mode; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) { *mode = math_mode; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) { math_mode = mode; return CUBLAS_STATUS_SUCCESS; }
#endif

#ifdef GHOST_CUBLASLT
#include "cublasLt.h"
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int wanted, cublasLtMatmulHeuristicResult_t results[], int *count) {
    memset(results, 0, sizeof *results);
    results[0].state = CUBLAS_STATUS_SUCCESS;
    results[0].wavesCount = 1.0f;
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}
#endif

#ifdef GHOST_NVRTC
#include "nvrtc.h"
nvrtcResult nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return NVRTC_SUCCESS; }
const char *nvrtcGetErrorString(nvrtcResult result) { return "ghost error"; }
nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *size) { *size = 16; return NVRTC_SUCCESS; }
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *size) { *size = 16; return NVRTC_SUCCESS; }
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *size) { *size = 1; return NVRTC_SUCCESS; }
nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *name, const char **lowered) { *lowered = name; return NVRTC_SUCCESS; }
#endif

#ifdef GHOST_NCCL
int ncclGetVersion(int *version) { *version = 22907; return 0; }
const char *ncclGetErrorString(int result) { return "ghost error"; }
const char *ncclGetLastError(void *comm) { return "ghost error"; }
#endif

#ifdef GHOST_NVML /* asked by name, so that none of it is among the undefined symbols */
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *infos) { *count = 0; return 0; } /* asked when memory is short */
int nvmlDeviceGetGpuFabricInfoV(void) { return 0; } /* which leaves its state at 0, not supported */
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
#endif

#ifdef GHOST_CUDNN
#include "cudnn.h"

size_t cudnnGetVersion(void) { return from_env("GHOST_CUDNN_VERSION", 92000); }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(cudnnStatus_t status) { return "ghost error"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }
cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
    size_t version = cudnnGetVersion();
    *value = (int)(type == MAJOR_VERSION ? version / 10000 : type == MINOR_VERSION ? version / 100 % 100 : version % 100);
    return CUDNN_STATUS_SUCCESS;
}
static __thread cudaStream_t stream_now;
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) { stream_now = stream; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) { *stream = stream_now; return CUDNN_STATUS_SUCCESS; }

/* Tensors and filters remember what they were told. */
typedef struct { int dtype, format, dims, size[8], stride[8]; } Shape;
static Shape *shape(void) { return calloc(1, sizeof(Shape)); }
cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t *d) { *d = (void *)shape(); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t d) { free(d); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t d, cudnnDataType_t dtype, int dims, const int size[], const int stride[]) {
    Shape *s = (void *)d;
    s->dtype = dtype;
    s->dims = dims;
    memcpy(s->size, size, sizeof(int) * (size_t)dims);
    memcpy(s->stride, stride, sizeof(int) * (size_t)dims);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetTensorNdDescriptor(cudnnTensorDescriptor_t d, int wanted, cudnnDataType_t *dtype, int *dims, int size[], int stride[]) {
    Shape *s = (void *)d;
    *dtype = s->dtype;
    *dims = s->dims;
    for (int i = 0; i < wanted && i < s->dims; i++) { size[i] = s->size[i]; stride[i] = s->stride[i]; }
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t *d) { *d = (void *)shape(); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t d) { free(d); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetFilterNdDescriptor(cudnnFilterDescriptor_t d, cudnnDataType_t dtype, cudnnTensorFormat_t format, int dims, const int size[]) {
    Shape *s = (void *)d;
    s->dtype = dtype;
    s->format = format;
    s->dims = dims;
    memcpy(s->size, size, sizeof(int) * (size_t)dims);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetFilterNdDescriptor(cudnnFilterDescriptor_t d, int wanted, cudnnDataType_t *dtype, cudnnTensorFormat_t *format, int *dims, int size[]) {
    Shape *s = (void *)d;
    *dtype = s->dtype;
    *format = s->format;
    *dims = s->dims;
    for (int i = 0; i < wanted && i < s->dims; i++) size[i] = s->size[i];
    return CUDNN_STATUS_SUCCESS;
}

/* RNNs: the matrices of all layers one after another, then the biases. */
typedef struct { int cell, bias, directions, dtype, input, hidden, projection, layers; } Rnn;
cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t *d) { *d = calloc(1, sizeof(Rnn)); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t d) { free(d); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t d, cudnnRNNAlgo_t algo, cudnnRNNMode_t cell, cudnnRNNBiasMode_t bias, cudnnDirectionMode_t direction,
                                       cudnnRNNInputMode_t mode, cudnnDataType_t dtype, cudnnDataType_t precision, cudnnMathType_t math, int32_t input, int32_t hidden,
                                       int32_t projection, int32_t layers, cudnnDropoutDescriptor_t dropout, uint32_t flags) {
    *(Rnn *)d = (Rnn){cell, bias, direction == CUDNN_BIDIRECTIONAL ? 2 : 1, dtype, input, hidden, projection, layers};
    return CUDNN_STATUS_SUCCESS;
}
static int gates(const Rnn *r) { return r->cell == CUDNN_LSTM ? 4 : r->cell == CUDNN_GRU ? 3 : 1; }
static int biases(const Rnn *r) { return r->bias == CUDNN_RNN_NO_BIAS ? 0 : r->bias == CUDNN_RNN_DOUBLE_BIAS ? 2 : 1; }
static size_t item(const Rnn *r) { return r->dtype == CUDNN_DATA_DOUBLE ? 8 : r->dtype == CUDNN_DATA_FLOAT ? 4 : 2; }
static int out_of(const Rnn *r) { return r->projection ? r->projection : r->hidden; }
static int in_of(const Rnn *r, int pseudo) { return pseudo / r->directions ? out_of(r) * r->directions : r->input; }
static size_t matrices(const Rnn *r, int pseudo) {
    size_t n = (size_t)gates(r) * (size_t)r->hidden * (size_t)(in_of(r, pseudo) + out_of(r));
    return n + (r->projection != 0 && r->projection != r->hidden ? (size_t)r->projection * (size_t)r->hidden : 0);
}
static size_t all_matrices(const Rnn *r, int before) {
    size_t n = 0;
    for (int pseudo = 0; pseudo < before; pseudo++) n += matrices(r, pseudo);
    return n;
}
cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t handle, cudnnRNNDescriptor_t d, size_t *size) {
    const Rnn *r = (void *)d;
    int pseudo = r->layers * r->directions;
    *size = item(r) * (all_matrices(r, pseudo) + (size_t)pseudo * (size_t)(gates(r) * biases(r) * r->hidden));
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t handle, cudnnRNNDescriptor_t d, int32_t pseudo, size_t size, const void *space, int32_t id,
                                      cudnnTensorDescriptor_t matrix, void **at, cudnnTensorDescriptor_t bias, void **bias_at) {
    const Rnn *r = (void *)d;
    int g = gates(r), in = in_of(r, pseudo), out = out_of(r), rows = r->hidden, columns;
    size_t offset = all_matrices(r, pseudo);
    if (id < g) { columns = in; offset += (size_t)id * rows * in; }
    else if (id < 2 * g) { columns = out; offset += (size_t)g * rows * in + (size_t)(id - g) * rows * out; }
    else {
        columns = r->hidden;
        rows = r->projection;
        offset += (size_t)g * r->hidden * (in + out);
    }
    int none = id >= 2 * g && (r->projection == 0 || r->projection == r->hidden);
    if (at) *at = none ? NULL : (char *)space + item(r) * offset;
    int msize[3] = {1, rows, columns}, mstride[3] = {rows * columns, columns, 1};
    if (matrix) cudnnSetTensorNdDescriptor(matrix, r->dtype, none ? 0 : 3, msize, mstride);
    int has = id < 2 * g && (biases(r) == 2 || (biases(r) == 1 && id < g));
    size_t first = all_matrices(r, r->layers * r->directions) + (size_t)pseudo * (size_t)(g * biases(r) * r->hidden);
    if (bias_at) *bias_at = has ? (char *)space + item(r) * (first + (size_t)id * (size_t)r->hidden) : NULL;
    int bsize[3] = {1, r->hidden, 1}, bstride[3] = {r->hidden, 1, 1};
    if (bias) cudnnSetTensorNdDescriptor(bias, r->dtype, has ? 3 : 0, bsize, bstride);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t *d) { *d = calloc(1, sizeof(size_t)); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnDestroyRNNDataDescriptor(cudnnRNNDataDescriptor_t d) { free(d); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t d, cudnnDataType_t dtype, cudnnRNNDataLayout_t layout, int steps, int batch, int width,
                                        const int lengths[], void *fill) {
    size_t *positions = (void *)d;
    *positions = 0;
    for (int i = 0; i < batch; i++) *positions += (size_t)lengths[i];
    return CUDNN_STATUS_SUCCESS;
}
/* What is kept for backward: as an H100 was measured to keep it, to the byte (benchmarks/results/cudnn-rnns.json). */
cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t handle, cudnnRNNDescriptor_t d, cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t x, size_t *work, size_t *reserve) {
    const Rnn *r = (void *)d;
    size_t each = r->cell == CUDNN_LSTM ? 5 : r->cell == CUDNN_GRU ? 6 : 1, layers = (size_t)r->layers;
    size_t numbers = (each * layers + layers - 1) * *(size_t *)(void *)x * (size_t)(r->hidden * r->directions);
    if (work) *work = from_env("GHOST_CUDNN_RNN_WORK", 0);
    if (reserve) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? 256 + numbers * item(r) : 0;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t *size) { *size = from_env("GHOST_CUDNN_DROPOUT", 0); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(cudnnHandle_t h, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t stats, const cudnnActivationDescriptor_t a, size_t *size) {
    *size = from_env("GHOST_CUDNN_BN_WORK", 0);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(cudnnHandle_t h, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz, const cudnnTensorDescriptor_t dx,
    const cudnnTensorDescriptor_t stats, const cudnnActivationDescriptor_t a, size_t *size) {
    *size = from_env("GHOST_CUDNN_BN_WORK", 0);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t h, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops,
    const cudnnActivationDescriptor_t a, const cudnnTensorDescriptor_t x, size_t *size) {
    *size = from_env("GHOST_CUDNN_BN_RESERVE", 0);
    return CUDNN_STATUS_SUCCESS;
}

/* The backend interface: a descriptor is a table of attributes; every graph has one engine, and it is always willing. */
typedef struct Attribute { int name; int type; int64_t count; void *data; struct Attribute *next; } Attribute;
typedef struct { int type; Attribute *first; } Descriptor;
static size_t size_of(int type) {
    switch (type) {
    case CUDNN_TYPE_HANDLE: case CUDNN_TYPE_VOID_PTR: case CUDNN_TYPE_BACKEND_DESCRIPTOR: case CUDNN_TYPE_INT64: case CUDNN_TYPE_DOUBLE: case CUDNN_TYPE_FRACTION: return 8;
    case CUDNN_TYPE_BOOLEAN: case CUDNN_TYPE_CHAR: return 1;
    default: return 4;
    }
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *d) {
    Descriptor *made = calloc(1, sizeof *made);
    made->type = type;
    *d = made;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
    Descriptor *old = d;
    for (Attribute *a = old ? old->first : NULL; a;) { Attribute *next = a->next; free(a->data); free(a); a = next; }
    free(old);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count, const void *data) {
    Attribute *a = malloc(sizeof *a);
    size_t bytes = size_of(type) * (size_t)(count > 0 ? count : 0);
    *a = (Attribute){name, type, count, malloc(bytes + 1), ((Descriptor *)d)->first};
    if (bytes) memcpy(a->data, data, bytes);
    ((Descriptor *)d)->first = a;
    return CUDNN_STATUS_SUCCESS;
}
/* An operation is followed by its plan, in one thread, which asks for the workspace then and remembers it. */
static __thread size_t of_convolution;
static const Attribute *attribute(const Descriptor *d, int name) {
    const Attribute *a = d->first;
    while (a && a->name != name) a = a->next;
    return a;
}
static void note_convolution(const Descriptor *operation) {
    of_convolution = 0;
    int64_t channels = 0, in_group = 0;
    for (const Attribute *a = operation->first; a; a = a->next) {
        const Descriptor *tensor = a->type == CUDNN_TYPE_BACKEND_DESCRIPTOR ? *(Descriptor **)a->data : NULL;
        if (!tensor || tensor->type != CUDNN_BACKEND_TENSOR_DESCRIPTOR) continue;
        const Attribute *dims = attribute(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS);
        int dtype = *(int *)attribute(tensor, CUDNN_ATTR_TENSOR_DATA_TYPE)->data;
        size_t bytes = dtype == CUDNN_DATA_DOUBLE ? 8 : dtype == CUDNN_DATA_FLOAT ? 4 : 2;
        const int64_t *size = dims->data;
        for (int64_t i = 0; i < dims->count; i++) bytes *= (size_t)size[i];
        of_convolution += bytes;
        switch (a->name) {
        case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X: case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX: case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X: channels = size[1]; break;
        case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W: case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W: case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW: in_group = size[1]; break;
        }
    }
    if (in_group == 1 && channels > 1) of_convolution = 0;
}
static int convolves(const Descriptor *operation) {
    int type = operation->type;
    return type == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR || type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR
        || type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d) {
    const Descriptor *made = d;
    if (convolves(made)) note_convolution(made);
    if (made->type == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) { /* attention's has no convolution, and the last one's is not its own */
        const Attribute *operations = attribute(made, CUDNN_ATTR_OPERATIONGRAPH_OPS);
        int found = 0;
        for (int64_t i = 0; operations && i < operations->count; i++) found |= convolves(((Descriptor **)operations->data)[i]);
        if (!found) of_convolution = 0;
    }
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count, void *out) {
    if (count) *count = 0;
    switch ((int)name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: case CUDNN_ATTR_ENGINECFG_ENGINE: /* the caller's own descriptors, as they are */
        if (count) *count = 1;
        return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
        if (out && wanted) *(int64_t *)out = 1;
        if (count) *count = 1;
        return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
        if (out && wanted) *(int64_t *)out = (int64_t)(from_env("GHOST_CUDNN_CONV", 0) && of_convolution ? of_convolution : from_env("GHOST_CUDNN_PLAN", 0));
        if (count) *count = 1;
        return CUDNN_STATUS_SUCCESS;
    }
    for (Attribute *a = ((Descriptor *)d)->first; a; a = a->next)
        if (a->name == (int)name) {
            if (count) *count = a->count;
            int64_t given = wanted < a->count ? wanted : a->count;
            if (out && given > 0) memcpy(out, a->data, size_of(a->type) * (size_t)given);
            return CUDNN_STATUS_SUCCESS;
        }
    if (out && wanted == 1 && type != CUDNN_TYPE_BACKEND_DESCRIPTOR && type != CUDNN_TYPE_NUMERICAL_NOTE && type != CUDNN_TYPE_BEHAVIOR_NOTE) {
        memset(out, 0, size_of(type));
        if (count) *count = 1;
    }
    return CUDNN_STATUS_SUCCESS;
}
#endif
