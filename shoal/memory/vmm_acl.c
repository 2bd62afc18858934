// Ascend's runtime (CANN's libascendcl). The declarations repeat the part of acl_rt.h that is used here, so that no
// header is needed. This has never run on a device.
#include <dlfcn.h>
#include <stdlib.h>
#include "vmm.h"

typedef struct { uint32_t id; int type; } Location;
typedef struct { int handle_type, allocation_type, attribute; Location location; uint64_t reserved; } Properties;
enum { PINNED = 0, HBM_HUGE = 4, ON_DEVICE = 1, HUGE_PAGES = 1, TO_DEVICE = 1, TO_HOST = 2, BAD_ALLOC = 200000, OUT_OF_MEMORY = 207001 };

#define CALLS(X) \
    X(aclrtSetDevice, (int32_t)) X(aclrtGetDevice, (int32_t *)) X(aclrtSynchronizeDevice, (void)) \
    X(aclrtGetMemInfo, (int, size_t *, size_t *)) X(aclrtMemGetAllocationGranularity, (Properties *, int, size_t *)) \
    X(aclrtReserveMemAddress, (void **, size_t, size_t, void *, uint64_t)) X(aclrtReleaseMemAddress, (void *)) \
    X(aclrtMallocPhysical, (void **, size_t, const Properties *, uint64_t)) X(aclrtFreePhysical, (void *)) \
    X(aclrtMapMem, (void *, size_t, size_t, void *, uint64_t)) X(aclrtUnmapMem, (void *)) \
    X(aclrtCreateStream, (void **)) X(aclrtSynchronizeStream, (void *)) X(aclrtDestroyStream, (void *)) \
    X(aclrtCreateEvent, (void **)) X(aclrtRecordEvent, (void *, void *)) X(aclrtSynchronizeEvent, (void *)) X(aclrtDestroyEvent, (void *)) \
    X(aclrtMemcpyAsync, (void *, size_t, const void *, size_t, int, void *)) \
    X(aclrtMallocHost, (void **, size_t)) X(aclrtFreeHost, (void *))

typedef struct {
#define FIELD(name, arguments) int (*name) arguments;
    CALLS(FIELD)
    const char *(*aclGetRecentErrMsg)(void);
} Acl;

static _Thread_local int32_t before = -1;      // the device that was current before `enter`; -1: none

static Acl *of(Driver *driver) { return driver->calls; }

static Properties properties(int device)
{
    return (Properties){.allocation_type = PINNED, .attribute = HBM_HUGE, .location = {(uint32_t)device, ON_DEVICE}};
}

static int enter(Driver *driver, int device)
{
    if (of(driver)->aclrtGetDevice(&before))
        before = -1;      // This thread has no current device yet.
    return before == device ? 0 : of(driver)->aclrtSetDevice(device);
}

static void leave(Driver *driver)
{
    if (before >= 0)
        of(driver)->aclrtSetDevice(before);
}

static int synchronize(Driver *driver) { return of(driver)->aclrtSynchronizeDevice(); }

static int granularity(Driver *driver, int device, size_t *bytes)
{
    Properties wanted = properties(device);
    return of(driver)->aclrtMemGetAllocationGranularity(&wanted, 0, bytes);
}

static int total(Driver *driver, int device, size_t *bytes)
{
    size_t available;
    (void)device;      // The call is about the current device.
    return of(driver)->aclrtGetMemInfo(HBM_HUGE, &available, bytes);
}

static int reserve(Driver *driver, uint64_t *address, size_t bytes)
{
    return of(driver)->aclrtReserveMemAddress((void **)address, bytes, 0, NULL, HUGE_PAGES);
}

static int unreserve(Driver *driver, uint64_t address, size_t bytes)
{
    (void)bytes;
    return of(driver)->aclrtReleaseMemAddress((void *)address);
}

static int create(Driver *driver, int device, size_t bytes, uint64_t *handle)
{
    Properties wanted = properties(device);
    return of(driver)->aclrtMallocPhysical((void **)handle, bytes, &wanted, 0);
}

static int release(Driver *driver, uint64_t handle) { return of(driver)->aclrtFreePhysical((void *)handle); }

static int map(Driver *driver, int device, uint64_t address, size_t bytes, uint64_t handle)
{
    (void)device;      // Mapped memory is accessible at once.
    return of(driver)->aclrtMapMem((void *)address, bytes, 0, (void *)handle, 0);
}

static int unmap(Driver *driver, uint64_t address, size_t bytes)
{
    (void)bytes;
    return of(driver)->aclrtUnmapMem((void *)address);
}

static int stream_create(Driver *driver, void **stream) { return of(driver)->aclrtCreateStream(stream); }
static int stream_wait(Driver *driver, void *stream) { return of(driver)->aclrtSynchronizeStream(stream); }
static int stream_destroy(Driver *driver, void *stream) { return of(driver)->aclrtDestroyStream(stream); }

static int event_record(Driver *driver, void **event, void *stream)
{
    int code = of(driver)->aclrtCreateEvent(event);
    if (code)
        return code;
    if ((code = of(driver)->aclrtRecordEvent(*event, stream))) {
        of(driver)->aclrtDestroyEvent(*event);
        *event = NULL;
    }
    return code;
}

static int event_wait(Driver *driver, void *event) { return of(driver)->aclrtSynchronizeEvent(event); }
static int event_destroy(Driver *driver, void *event) { return of(driver)->aclrtDestroyEvent(event); }

static int to_host(Driver *driver, void *host, uint64_t address, size_t bytes, void *stream)
{
    return of(driver)->aclrtMemcpyAsync(host, bytes, (void *)address, bytes, TO_HOST, stream);
}

static int to_device(Driver *driver, uint64_t address, void *host, size_t bytes, void *stream)
{
    return of(driver)->aclrtMemcpyAsync((void *)address, bytes, host, bytes, TO_DEVICE, stream);
}

static int host_alloc(Driver *driver, size_t bytes, void **data, bool *pinned)
{
    *pinned = !of(driver)->aclrtMallocHost(data, bytes);
    return *pinned ? 0 : plain_alloc(bytes, data);
}

static void host_free(Driver *driver, void *data, size_t bytes, bool pinned)
{
    if (pinned)
        of(driver)->aclrtFreeHost(data);
    else
        plain_free(data, bytes);
}

static const char *describe(Driver *driver, int code)
{
    const char *text = of(driver)->aclGetRecentErrMsg ? of(driver)->aclGetRecentErrMsg() : NULL;
    (void)code;
    return text ? text : "see CANN's table of error codes";
}

static bool is_full(int code) { return code == BAD_ALLOC || code == OUT_OF_MEMORY; }

int acl_open(Driver *driver, const char *path, Status *status)
{
    void *library = dlopen(path ? path : "libascendcl.so", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return fail(status, DRIVER_ERROR, 0, 0, "Ascend's runtime can't be opened: %s", dlerror());
    Acl *acl = calloc(1, sizeof *acl);
    const char *missing = NULL;
#define FIND(name, arguments) if (!(*(void **)&acl->name = dlsym(library, #name))) missing = #name;
    CALLS(FIND)
    *(void **)&acl->aclGetRecentErrMsg = dlsym(library, "aclGetRecentErrMsg");
    if (missing) {
        fail(status, DRIVER_ERROR, 0, 0, "Ascend's runtime is too old: it has no %s", missing);
        free(acl);
        return dlclose(library), -1;
    }
    *driver = (Driver){"ACL", library, acl, enter, leave, synchronize, granularity, total, reserve, unreserve, create, release, map,
                       unmap, stream_create, stream_wait, stream_destroy, event_record, event_wait, event_destroy, to_host, to_device,
                       host_alloc, host_free, describe, is_full};
    return 0;
}
