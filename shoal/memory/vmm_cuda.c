// The CUDA driver. The declarations repeat the part of cuda.h that is used here, which belongs to CUDA's stable
// ABI, so that no header is needed.
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "vmm.h"

#define MAX_DEVICES 64

typedef struct { int type, id; } Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} Properties;
typedef struct { Location location; int flags; } Access;
enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, NON_BLOCKING = 1, NO_TIMING = 2, PORTABLE = 1, OUT_OF_MEMORY = 2 };

#define CALLS(X) \
    X(cuInit, (unsigned)) X(cuDeviceGet, (int *, int)) X(cuDevicePrimaryCtxRetain, (void **, int)) X(cuCtxPushCurrent_v2, (void *)) \
    X(cuCtxPopCurrent_v2, (void **)) X(cuCtxSynchronize, (void)) X(cuDeviceTotalMem_v2, (size_t *, int)) \
    X(cuMemGetAllocationGranularity, (size_t *, const Properties *, int)) \
    X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, uint64_t)) X(cuMemAddressFree, (uint64_t, size_t)) \
    X(cuMemCreate, (uint64_t *, size_t, const Properties *, uint64_t)) X(cuMemRelease, (uint64_t)) \
    X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, uint64_t)) X(cuMemUnmap, (uint64_t, size_t)) \
    X(cuMemSetAccess, (uint64_t, size_t, const Access *, size_t)) \
    X(cuStreamCreate, (void **, unsigned)) X(cuStreamSynchronize, (void *)) X(cuStreamDestroy_v2, (void *)) \
    X(cuEventCreate, (void **, unsigned)) X(cuEventRecord, (void *, void *)) X(cuEventSynchronize, (void *)) \
    X(cuEventDestroy_v2, (void *)) \
    X(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *)) X(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *)) \
    X(cuMemHostRegister_v2, (void *, size_t, unsigned)) X(cuMemHostUnregister, (void *)) X(cuGetErrorString, (int, const char **))

typedef struct {
#define FIELD(name, arguments) int (*name) arguments;
    CALLS(FIELD)
    pthread_mutex_t lock;
    void *contexts[MAX_DEVICES];
} Cuda;

static Cuda *of(Driver *driver) { return driver->calls; }

// No handle type is set, so the memory cannot be shared with another process, which would keep it after a
// pause. NCCL tries to share the memory that a graph uses.
static Properties properties(int device)
{
    return (Properties){.type = PINNED, .location = {ON_DEVICE, device}};
}

// Enters the primary context, which PyTorch uses too. It is retained for the life of the process.
static int enter(Driver *driver, int device)
{
    Cuda *cuda = of(driver);
    int code = 0, handle;
    if (device < 0 || device >= MAX_DEVICES)
        return 101;      // CUDA_ERROR_INVALID_DEVICE
    pthread_mutex_lock(&cuda->lock);
    if (!cuda->contexts[device] && !(code = cuda->cuDeviceGet(&handle, device)))
        code = cuda->cuDevicePrimaryCtxRetain(&cuda->contexts[device], handle);
    pthread_mutex_unlock(&cuda->lock);
    return code ? code : cuda->cuCtxPushCurrent_v2(cuda->contexts[device]);
}

static void leave(Driver *driver)
{
    void *context;
    of(driver)->cuCtxPopCurrent_v2(&context);
}

static int synchronize(Driver *driver) { return of(driver)->cuCtxSynchronize(); }

static int granularity(Driver *driver, int device, size_t *bytes)
{
    Properties wanted = properties(device);
    return of(driver)->cuMemGetAllocationGranularity(bytes, &wanted, 0);
}

static int total(Driver *driver, int device, size_t *bytes)
{
    int handle, code = of(driver)->cuDeviceGet(&handle, device);
    return code ? code : of(driver)->cuDeviceTotalMem_v2(bytes, handle);
}

static int reserve(Driver *driver, uint64_t *address, size_t bytes) { return of(driver)->cuMemAddressReserve(address, bytes, 0, 0, 0); }
static int unreserve(Driver *driver, uint64_t address, size_t bytes) { return of(driver)->cuMemAddressFree(address, bytes); }

static int create(Driver *driver, int device, size_t bytes, uint64_t *handle)
{
    Properties wanted = properties(device);
    return of(driver)->cuMemCreate(handle, bytes, &wanted, 0);
}

static int release(Driver *driver, uint64_t handle) { return of(driver)->cuMemRelease(handle); }

static int map(Driver *driver, int device, uint64_t address, size_t bytes, uint64_t handle)
{
    Access access = {{ON_DEVICE, device}, READ_WRITE};
    int code = of(driver)->cuMemMap(address, bytes, 0, handle, 0);
    if (code)
        return code;
    if ((code = of(driver)->cuMemSetAccess(address, bytes, &access, 1)))
        of(driver)->cuMemUnmap(address, bytes);
    return code;
}

static int unmap(Driver *driver, uint64_t address, size_t bytes) { return of(driver)->cuMemUnmap(address, bytes); }
static int stream_create(Driver *driver, void **stream) { return of(driver)->cuStreamCreate(stream, NON_BLOCKING); }
static int stream_wait(Driver *driver, void *stream) { return of(driver)->cuStreamSynchronize(stream); }
static int stream_destroy(Driver *driver, void *stream) { return of(driver)->cuStreamDestroy_v2(stream); }

static int event_record(Driver *driver, void **event, void *stream)
{
    int code = of(driver)->cuEventCreate(event, NO_TIMING);
    if (code)
        return code;
    if ((code = of(driver)->cuEventRecord(*event, stream))) {
        of(driver)->cuEventDestroy_v2(*event);
        *event = NULL;
    }
    return code;
}

static int event_wait(Driver *driver, void *event) { return of(driver)->cuEventSynchronize(event); }
static int event_destroy(Driver *driver, void *event) { return of(driver)->cuEventDestroy_v2(event); }

static int to_host(Driver *driver, void *host, uint64_t address, size_t bytes, void *stream)
{
    return of(driver)->cuMemcpyDtoHAsync_v2(host, address, bytes, stream);
}

static int to_device(Driver *driver, uint64_t address, void *host, size_t bytes, void *stream)
{
    return of(driver)->cuMemcpyHtoDAsync_v2(address, host, bytes, stream);
}

static int host_alloc(Driver *driver, size_t bytes, void **data, bool *pinned)
{
    int code = plain_alloc(bytes, data);
    if (!code)
        *pinned = !of(driver)->cuMemHostRegister_v2(*data, bytes, PORTABLE);
    return code;
}

static void host_free(Driver *driver, void *data, size_t bytes, bool pinned)
{
    if (pinned)
        of(driver)->cuMemHostUnregister(data);
    plain_free(data, bytes);
}

static const char *describe(Driver *driver, int code)
{
    const char *text = NULL;
    return of(driver)->cuGetErrorString(code, &text) || !text ? "unknown error" : text;
}

static bool is_full(int code) { return code == OUT_OF_MEMORY; }

int cuda_open(Driver *driver, const char *path, Status *status)
{
    void *library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return fail(status, DRIVER_ERROR, 0, 0, "the CUDA driver can't be opened: %s", dlerror());
    Cuda *cuda = calloc(1, sizeof *cuda);
    const char *missing = NULL;
#define FIND(name, arguments) if (!(*(void **)&cuda->name = dlsym(library, #name))) missing = #name;
    CALLS(FIND)
    int code = missing ? 0 : cuda->cuInit(0);
    if (missing || code) {
        fail(status, DRIVER_ERROR, code, 0, missing ? "the CUDA driver is too old: it has no %s" : "cuInit failed", missing);
        free(cuda);
        return dlclose(library), -1;
    }
    pthread_mutex_init(&cuda->lock, NULL);
    *driver = (Driver){"CUDA", library, cuda, enter, leave, synchronize, granularity, total, reserve, unreserve, create, release, map,
                       unmap, stream_create, stream_wait, stream_destroy, event_record, event_wait, event_destroy, to_host, to_device,
                       host_alloc, host_free, describe, is_full};
    return 0;
}
