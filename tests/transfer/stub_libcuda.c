/* A CUDA driver library without a device, for tests of what the bindings hand over. Copies happen in the call, events
 * pass when STUB_WAIT_MS have gone by in cuEventSynchronize, and every call is written to the file STUB_LOG. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, STREAM_CAPTURE_UNSUPPORTED = 900, STREAM_CAPTURE_IMPLICIT = 906 };

static __thread void *current[64];
static __thread int depth = 0;
static __thread int capture_mode = 0; /* global, as in every thread that nobody asked otherwise */
static uintptr_t last_handle = 0x1000;

static void say(const char *format, ...) {
    const char *path = getenv("STUB_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    va_list arguments;
    if (!file) return;
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    fputc('\n', file);
    fclose(file);
}

static int version(void) {
    const char *given = getenv("STUB_VERSION");
    return given ? atoi(given) : 13000;
}

/* What a kernel that ended the context has every later call say, from the first wait on that comes after it. */
static CUresult launched = OK, ended = OK;

static CUresult answer(void) { /* STUB_LOST: the code that a lost device answers with */
    const char *code = getenv("STUB_LOST");
    return code ? atoi(code) : ended;
}

CUresult cuInit(unsigned flags) { say("init %u", flags); return OK; }
CUresult cuDriverGetVersion(int *found) { *found = version(); return OK; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; say("device %d", ordinal); return ordinal < 2 ? OK : 101; }
CUresult cuDeviceGetPCIBusId(char *found, int size, int device) { snprintf(found, size, "0000:1B:0%d.0", device); return OK; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 91 && !getenv("STUB_UNMAPPED"); /* can use the host pointer for registered memory */
    return OK;
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(uintptr_t)(0x100 + device); return OK; }
CUresult cuCtxPushCurrent(void *context) { current[depth++] = context; return OK; }
CUresult cuCtxPopCurrent(void **context) { void *was = current[--depth]; if (context) *context = was; return OK; }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
CUresult cuCtxPushCurrent_v2(void *context) { return cuCtxPushCurrent(context); }
CUresult cuCtxPopCurrent_v2(void **context) { return cuCtxPopCurrent(context); }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }

/* What a graph that is captured in another thread makes of a call like these. */
static CUresult unsafe(CUresult otherwise) {
    return getenv("STUB_CAPTURE_ELSEWHERE") && capture_mode != 2 ? STREAM_CAPTURE_UNSUPPORTED : otherwise;
}
CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    int was = capture_mode;
    capture_mode = *mode;
    *mode = was;
    return OK;
}
CUresult cuStreamIsCapturing(void *stream, int *status) {
    const char *captured = getenv("STUB_CAPTURED");
    if (getenv("STUB_CAPTURED_BLOCKING") && stream == (void *)1) return STREAM_CAPTURE_IMPLICIT; /* the default stream */
    *status = captured && stream == (void *)(uintptr_t)atoi(captured);
    return OK;
}

CUresult cuMemHostRegister(void *address, size_t size, unsigned flags) {
    const char *limit = getenv("STUB_PINNABLE");
    say("register %zx %zu flags %u depth %d", (size_t)address, size, flags, depth);
    return limit && size > (size_t)atoll(limit) ? OUT_OF_MEMORY : unsafe(OK);
}
CUresult cuMemHostUnregister(void *address) { say("unregister %zx", (size_t)address); return OK; }

CUresult cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    *stream = (void *)(last_handle += 16);
    say("stream %zx flags %u priority %d", (size_t)*stream, flags, priority);
    return OK;
}
CUresult cuStreamDestroy(void *stream) { say("destroy stream %zx", (size_t)stream); return OK; }
CUresult cuStreamDestroy_v2(void *stream) { return cuStreamDestroy(stream); }
CUresult cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    say("stream %zx waits for %zx flags %u", (size_t)stream, (size_t)event, flags);
    return answer();
}

CUresult cuEventCreate(void **event, unsigned flags) {
    *event = (void *)(last_handle += 16);
    say("event %zx flags %u", (size_t)*event, flags);
    return OK;
}
CUresult cuEventRecord(void *event, void *stream) { say("record %zx on %zx", (size_t)event, (size_t)stream); return answer(); }
CUresult cuEventQuery(void *event) { say("query %zx", (size_t)event); return getenv("STUB_BUSY") ? NOT_READY : unsafe(answer()); }
CUresult cuEventSynchronize(void *event) {
    const char *wait = getenv("STUB_WAIT_MS");
    say("synchronize %zx", (size_t)event);
    if (wait) usleep(1000 * atoi(wait));
    if (launched) ended = launched;
    return unsafe(answer());
}
CUresult cuEventDestroy(void *event) { say("destroy event %zx", (size_t)event); return OK; }

CUresult cuMemcpyAsync(uint64_t destination, uint64_t source, size_t size, void *stream) {
    memcpy((void *)destination, (void *)source, size);
    say("copy %zu on %zx", size, (size_t)stream);
    return answer();
}

/* Two kernels that end the context: an illegal access, and a launch that fails. */
CUresult cuModuleLoadData(void **module, const void *image) { *module = (void *)(last_handle += 16); say("module"); return answer(); }
CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)(uintptr_t)(strcmp(name, "illegal") ? 719 : 700);
    return answer();
}
CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra) {
    launched = (CUresult)(uintptr_t)function;
    return OK;
}

typedef struct { int order; struct { int type, id; } source, destination; unsigned flags; } Attributes;

/* As drivers from 12.8 on have it, when they are asked for the function of that version. */
CUresult cuMemcpyBatchAsync(uint64_t *destinations, uint64_t *sources, size_t *sizes, size_t count, Attributes *attributes,
                            size_t *holds_from, size_t num_attributes, size_t *refused, void *stream) {
    const char *segment = getenv("STUB_SEGMENT"); /* bytes of a physical allocation: a larger piece lies in two */
    size_t total = 0;
    for (size_t n = 0; n < count; n++)
        if (segment && sizes[n] > (size_t)atoll(segment)) {
            *refused = n;
            return INVALID_VALUE;
        }
    for (size_t n = 0; n < count; n++) {
        memcpy((void *)destinations[n], (void *)sources[n], sizes[n]);
        total += sizes[n];
    }
    say("batch %zu pieces %zu bytes order %d flags %u location %d %d attributes %zu from %zu on %zx depth %d", count, total,
        attributes->order, attributes->flags, attributes->source.type, attributes->destination.type, num_attributes,
        holds_from[0], (size_t)stream, depth);
    *refused = SIZE_MAX;
    return answer();
}

static const char *const names[] = {
    "cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute", "cuDeviceGetPCIBusId", "cuCtxPushCurrent", "cuCtxPopCurrent",
    "cuCtxGetStreamPriorityRange", "cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing", "cuMemHostRegister", "cuMemHostUnregister", "cuStreamCreateWithPriority",
    "cuStreamDestroy", "cuStreamWaitEvent", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize",
    "cuEventDestroy", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuGetProcAddress", NULL};

CUresult cuGetProcAddress_v2(const char *symbol, void **found, int wanted, uint64_t flags, int *status);

CUresult cuGetProcAddress(const char *symbol, void **found, int wanted, uint64_t flags) {
    int status;
    return cuGetProcAddress_v2(symbol, found, wanted, flags, &status);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **found, int wanted, uint64_t flags, int *status) {
    int is_batch = !strcmp(symbol, "cuMemcpyBatchAsync");
    *found = NULL;
    if (status) *status = 1;
    if (is_batch && wanted == 12080) say("asked for batches of %d with flags %zu", wanted, (size_t)flags);
    if (wanted > version()) return INVALID_VALUE;
    if (is_batch && wanted >= 13000) return OK; /* has another form there, which nobody here should ask for */
    for (int n = 0; names[n]; n++)
        if (!strcmp(symbol, names[n])) {
            *found = !strcmp(symbol, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : dlsym(RTLD_DEFAULT, symbol);
            if (!*found) *found = dlsym(RTLD_NEXT, symbol);
            if (status) *status = 0;
        }
    return OK;
}
