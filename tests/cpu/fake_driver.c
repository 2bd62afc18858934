// libcuda and libascendcl for tests, in host memory. Physical memory is a sparse file, so unmapped addresses fault and contents are real.
// Copies are done when they are waited for, at the latest. Counts all resources; misuse that a driver would punish is a violation.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX 65536
#define GRANULARITY 65536
#define STORE (16ll << 30)

typedef struct { uint64_t base; size_t size; } Reserved;
typedef struct { size_t size; int64_t at; int device, maps; bool live; } Physical;
typedef struct { uint64_t address; size_t size; uint64_t handle; bool access, live; } Mapping;
typedef struct { void *to; const void *from; size_t size; uint64_t device; bool done; } Op;
typedef struct { Op ops[4096]; int count, done; bool live; } Stream;
typedef struct { Stream *stream; int upto; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Reserved reserved[64];
static Physical physical[MAX];
static Mapping mappings[MAX];
static int num_physical, num_mappings, streams_live, events_live, pinned_live, store = -1;
static int64_t store_end, in_use;
static char violation[256];
static _Thread_local int contexts[64], depth;
static _Thread_local int acl_device = -1;
long fake_calls, fake_fail_at, fake_fail_code = 999, fake_refuse_pin, fake_syncs, fake_unmaps;
int64_t fake_capacity = 1ll << 32;
char fake_failed[64];

const char *fake_violation(void) { return violation; }
void fake_counts(int64_t *out)      // reserved, physical, mapped, streams, events, pinned, bytes
{
    memset(out, 0, 7 * sizeof *out);
    for (int i = 0; i < 64; i++) out[0] += !!reserved[i].size;
    for (int i = 0; i < num_physical; i++) out[1] += physical[i].live;
    for (int i = 0; i < num_mappings; i++) out[2] += mappings[i].live;
    out[3] = streams_live, out[4] = events_live, out[5] = pinned_live, out[6] = in_use;
}
void fake_reset(void) { violation[0] = 0, fake_failed[0] = 0, fake_fail_at = fake_refuse_pin = 0, fake_capacity = 1ll << 32; }

static void violate(const char *what, uint64_t value)
{
    if (!violation[0])
        snprintf(violation, sizeof violation, "%s (%llx)", what, (unsigned long long)value);
}

static int begin(const char *name, bool fallible, bool needs_context)      // takes the lock
{
    pthread_mutex_lock(&lock);
    if (needs_context && !depth && acl_device < 0)
        violate(name, 0xc0);
    if (fallible && ++fake_calls == fake_fail_at) {
        snprintf(fake_failed, sizeof fake_failed, "%s", name);
        pthread_mutex_unlock(&lock);
        return fake_fail_code;
    }
    return 0;
}
static int end(int code) { pthread_mutex_unlock(&lock); return code; }
#define BEGIN(fallible, context) int failed = begin(__func__, fallible, context); if (failed) return failed;

static Mapping *mapping_of(uint64_t address)
{
    for (int i = 0; i < num_mappings; i++)
        if (mappings[i].live && address >= mappings[i].address && address < mappings[i].address + mappings[i].size)
            return &mappings[i];
    return NULL;
}

static int do_reserve(uint64_t *address, size_t size)
{
    if (size % GRANULARITY) violate("reserve: size", size);
    for (int i = 0; i < 64; i++)
        if (!reserved[i].size) {
            char *at = mmap(NULL, size + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (at == MAP_FAILED) return 2;
            reserved[i] = (Reserved){((uint64_t)at + (2 << 20) - 1) & ~((2ull << 20) - 1), size};
            *address = reserved[i].base;
            return 0;
        }
    return 2;
}

static int do_unreserve(uint64_t address, size_t size)
{
    for (int i = 0; i < 64; i++)
        if (reserved[i].size && reserved[i].base == address) {
            if (size && size != reserved[i].size) violate("unreserve: size", size);
            for (int j = 0; j < num_mappings; j++)
                if (mappings[j].live && mappings[j].address >= address && mappings[j].address < address + reserved[i].size)
                    violate("unreserve: still mapped", mappings[j].address);
            munmap((void *)address, reserved[i].size);
            reserved[i].size = 0;
            return 0;
        }
    violate("unreserve: unknown", address);
    return 1;
}

static int do_create(uint64_t *handle, size_t size, int device, int full)
{
    if (size % GRANULARITY || !size) violate("create: size", size);
    if (in_use + (int64_t)size > fake_capacity) return full;
    if (store < 0) { store = memfd_create("fake", 0); if (ftruncate(store, STORE)) return 1; }
    if (store_end + (int64_t)size > STORE) store_end = 0;      // long released
    int i = 0;
    while (i < num_physical && physical[i].live) i++;
    if (i == num_physical) num_physical++;
    physical[i] = (Physical){size, store_end, device, 0, true};
    char *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, store, store_end);
    memset(data, 0xAB, size);      // what it held before is anyone's guess
    munmap(data, size);
    store_end += size, in_use += size;
    *handle = i + 1;
    return 0;
}

static int do_release(uint64_t handle)
{
    if (!handle || handle > (uint64_t)num_physical || !physical[handle - 1].live) { violate("release: unknown", handle); return 1; }
    Physical *piece = &physical[handle - 1];
    if (piece->maps) violate("release: still mapped", handle);
    piece->live = false, in_use -= piece->size;
    fallocate(store, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, piece->at, piece->size);
    return 0;
}

static int do_map(uint64_t address, size_t size, uint64_t handle, bool access)
{
    if (!handle || handle > (uint64_t)num_physical || !physical[handle - 1].live) { violate("map: unknown handle", handle); return 1; }
    Physical *piece = &physical[handle - 1];
    if (piece->size != size) violate("map: size", size);
    if (piece->maps) violate("map: handle mapped twice", handle);
    if (mapping_of(address) || mapping_of(address + size - 1)) violate("map: address mapped twice", address);
    bool inside = false;
    for (int i = 0; i < 64; i++)
        inside |= reserved[i].size && address >= reserved[i].base && address + size <= reserved[i].base + reserved[i].size;
    if (!inside) { violate("map: not reserved", address); return 1; }
    mmap((void *)address, size, access ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_SHARED | MAP_FIXED, store, piece->at);
    int i = 0;
    while (i < num_mappings && mappings[i].live) i++;
    if (i == num_mappings) num_mappings++;
    mappings[i] = (Mapping){address, size, handle, access, true};
    piece->maps++;
    return 0;
}

static int do_unmap(uint64_t address, size_t size)
{
    fake_unmaps++;
    Mapping *mapping = mapping_of(address);
    if (!mapping || mapping->address != address || (size && mapping->size != size)) { violate("unmap: not mapped so", address); return 1; }
    mmap((void *)address, mapping->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mapping->live = false;
    physical[mapping->handle - 1].maps--;
    return 0;
}

static void run(Stream *stream, int upto)
{
    for (; stream->done < upto; stream->done++) {
        Op *op = &stream->ops[stream->done];
        Mapping *first = mapping_of(op->device), *last = mapping_of(op->device + op->size - 1);
        if (!first || first != last || !first->access)
            violate("copy: not mapped", op->device);
        else
            memcpy(op->to, op->from, op->size);
    }
    if (stream->done == stream->count)
        stream->done = stream->count = 0;
}

static int do_copy(void *to, const void *from, size_t size, uint64_t device, Stream *stream)
{
    if (!stream || !stream->live) { violate("copy: no stream", 0); return 1; }
    if (stream->count == 4096) run(stream, 4096);
    stream->ops[stream->count++] = (Op){to, from, size, device, false};
    return 0;
}

static int do_stream(void **stream) { Stream *made = calloc(1, sizeof *made); made->live = true; streams_live++; *stream = made; return 0; }
static int do_stream_end(Stream *stream) { run(stream, stream->count); stream->live = false; streams_live--; free(stream); return 0; }
static int do_event(void **event) { *event = calloc(1, sizeof(Event)); events_live++; return 0; }
static int do_event_wait(Event *event)
{
    int most = event->stream->count;
    run(event->stream, event->upto < most ? event->upto : most);
    return 0;
}
static int do_event_failure(Event *event, int code)      // a copy that failed leaves nobody knows what
{
    pthread_mutex_lock(&lock);
    Stream *stream = event->stream;
    for (; stream->done < stream->count && stream->done < event->upto; stream->done++)
        memset(stream->ops[stream->done].to, 0xEE, stream->ops[stream->done].size);
    return end(code);
}
static int do_event_end(void *event) { free(event); events_live--; return 0; }

// ---- libcuda
typedef struct { int type, id; } Location;
typedef struct { int type, handles; Location location; void *win32; unsigned char rest[8]; } Properties;
typedef struct { Location location; int flags; } Access;

int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *handle, int device) { *handle = device; return device < 0 || device > 3 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return 0; }
int cuCtxPushCurrent_v2(void *context) { contexts[depth++] = (int)(intptr_t)context - 1; return 0; }
int cuCtxPopCurrent_v2(void **context)
{
    if (!depth) { violate("pop: no context", 0); return 1; }
    *context = (void *)(intptr_t)(contexts[--depth] + 1);
    return 0;
}
int cuCtxSynchronize(void) { BEGIN(true, true) fake_syncs++; return end(0); }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = 64 << 20; return 0; }
int cuMemGetAllocationGranularity(size_t *bytes, const Properties *p, int option)
{
    BEGIN(true, true)
    if (p->type != 1 || p->location.type != 1 || option) violate("granularity: arguments", 0);
    *bytes = GRANULARITY;
    return end(0);
}
int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t at, uint64_t flags)
{
    BEGIN(true, true)
    if (alignment || at || flags) violate("reserve: arguments", 0);
    return end(do_reserve(address, size));
}
int cuMemAddressFree(uint64_t address, size_t size) { BEGIN(false, true) return end(do_unreserve(address, size)); }
int cuMemCreate(uint64_t *handle, size_t size, const Properties *p, uint64_t flags)
{
    BEGIN(true, true)
    if (p->type != 1 || p->location.type != 1 || flags) violate("create: properties", 0);
    return end(do_create(handle, size, p->location.id, 2));
}
int cuMemRelease(uint64_t handle) { BEGIN(true, true) return end(do_release(handle)); }
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags)
{
    BEGIN(true, true)
    if (offset || flags) violate("map: arguments", offset);
    return end(do_map(address, size, handle, false));
}
int cuMemUnmap(uint64_t address, size_t size) { BEGIN(true, true) return end(do_unmap(address, size)); }
int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count)
{
    BEGIN(true, true)
    Mapping *mapping = mapping_of(address);
    if (!mapping || mapping->address != address || mapping->size != size || count != 1 || access->flags != 3
        || access->location.id != physical[mapping->handle - 1].device)
        violate("access: arguments", address);
    else {
        mapping->access = true;
        mprotect((void *)address, size, PROT_READ | PROT_WRITE);
    }
    return end(0);
}
int cuStreamCreate(void **stream, unsigned flags)
{
    BEGIN(true, true)
    if (flags != 1) violate("stream: flags", flags);
    return end(do_stream(stream));
}
int cuStreamSynchronize(void *stream) { BEGIN(true, true) run(stream, ((Stream *)stream)->count); return end(0); }
int cuStreamDestroy_v2(void *stream) { BEGIN(false, true) return end(do_stream_end(stream)); }
int cuEventCreate(void **event, unsigned flags) { BEGIN(true, true) (void)flags; return end(do_event(event)); }
int cuEventRecord(Event *event, Stream *stream) { BEGIN(true, true) *event = (Event){stream, stream->count}; return end(0); }
int cuEventSynchronize(Event *event)
{
    int failed = begin(__func__, true, true);
    return failed ? do_event_failure(event, failed) : end(do_event_wait(event));
}
int cuEventDestroy_v2(void *event) { BEGIN(false, true) return end(do_event_end(event)); }
int cuMemcpyDtoHAsync_v2(void *host, uint64_t device, size_t size, void *stream)
{
    BEGIN(true, true)
    return end(do_copy(host, (void *)device, size, device, stream));
}
int cuMemcpyHtoDAsync_v2(uint64_t device, const void *host, size_t size, void *stream)
{
    BEGIN(true, true)
    return end(do_copy((void *)device, host, size, device, stream));
}
int cuMemHostRegister_v2(void *host, size_t size, unsigned flags)
{
    BEGIN(false, true)
    if (flags != 1 || (uint64_t)host % 4096 || !size) violate("register: arguments", flags);
    if (fake_refuse_pin) return end(2);
    pinned_live++;
    return end(0);
}
int cuMemHostUnregister(void *host) { BEGIN(false, true) (void)host; pinned_live--; return end(0); }
int cuGetErrorString(int code, const char **text) { *text = code == 2 ? "out of memory" : "injected"; return 0; }

// ---- libascendcl
typedef struct { uint32_t id; int type; } AclLocation;
typedef struct { int handles, allocation, attribute; AclLocation location; uint64_t reserve; } AclProperties;

int aclrtSetDevice(int32_t device) { acl_device = device; return 0; }
int aclrtGetDevice(int32_t *device) { *device = acl_device; return acl_device < 0 ? 107002 : 0; }
int aclrtSynchronizeDevice(void) { BEGIN(true, true) fake_syncs++; return end(0); }
int aclrtGetMemInfo(int attribute, size_t *available, size_t *total)
{
    if (attribute != 4) violate("info: attribute", attribute);
    *available = *total = 64 << 20;
    return 0;
}
static void check(const AclProperties *p)
{
    if (p->handles || p->allocation || p->attribute != 4 || p->location.type != 1 || p->reserve || (int)p->location.id != acl_device)
        violate("physical: properties", p->attribute);
}
int aclrtMemGetAllocationGranularity(AclProperties *p, int option, size_t *bytes)
{
    BEGIN(true, true)
    check(p);
    if (option) violate("granularity: option", option);
    *bytes = GRANULARITY;
    return end(0);
}
int aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *at, uint64_t flags)
{
    BEGIN(true, true)
    if (alignment || at || flags != 1) violate("reserve: arguments", flags);
    return end(do_reserve((uint64_t *)address, size));
}
int aclrtReleaseMemAddress(void *address) { BEGIN(false, true) return end(do_unreserve((uint64_t)address, 0)); }
int aclrtMallocPhysical(void **handle, size_t size, const AclProperties *p, uint64_t flags)
{
    BEGIN(true, true)
    check(p);
    if (flags) violate("physical: flags", flags);
    return end(do_create((uint64_t *)handle, size, p->location.id, 207001));
}
int aclrtFreePhysical(void *handle) { BEGIN(true, true) return end(do_release((uint64_t)handle)); }
int aclrtMapMem(void *address, size_t size, size_t offset, void *handle, uint64_t flags)
{
    BEGIN(true, true)
    if (offset || flags) violate("map: arguments", offset);
    return end(do_map((uint64_t)address, size, (uint64_t)handle, true));
}
int aclrtUnmapMem(void *address) { BEGIN(true, true) return end(do_unmap((uint64_t)address, 0)); }
int aclrtCreateStream(void **stream) { BEGIN(true, true) return end(do_stream(stream)); }
int aclrtSynchronizeStream(void *stream) { BEGIN(true, true) run(stream, ((Stream *)stream)->count); return end(0); }
int aclrtDestroyStream(void *stream) { BEGIN(false, true) return end(do_stream_end(stream)); }
int aclrtCreateEvent(void **event) { BEGIN(true, true) return end(do_event(event)); }
int aclrtRecordEvent(Event *event, Stream *stream) { BEGIN(true, true) *event = (Event){stream, stream->count}; return end(0); }
int aclrtSynchronizeEvent(Event *event)
{
    int failed = begin(__func__, true, true);
    return failed ? do_event_failure(event, failed) : end(do_event_wait(event));
}
int aclrtDestroyEvent(void *event) { BEGIN(false, true) return end(do_event_end(event)); }
int aclrtMemcpyAsync(void *to, size_t most, const void *from, size_t size, int kind, void *stream)
{
    BEGIN(true, true)
    if (most < size || (kind != 1 && kind != 2)) violate("copy: arguments", kind);
    return end(do_copy(to, from, size, (uint64_t)(kind == 1 ? to : from), stream));
}
int aclrtMallocHost(void **data, size_t size)
{
    BEGIN(false, true)
    if (fake_refuse_pin || posix_memalign(data, 4096, size)) return end(207000);
    pinned_live++;
    return end(0);
}
int aclrtFreeHost(void *data) { BEGIN(false, true) free(data); pinned_live--; return end(0); }
