// Regions of device memory whose physical pieces can be given back and taken again at the same addresses. No build-time need of CUDA or
// CANN: drivers are opened at run time, behind one table of functions.
#pragma once
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stddef.h>

// What went wrong in a call; its caller owns it, so no failure is seen by another call.
enum { OK, DEVICE_MEMORY, HOST_MEMORY, DRIVER_ERROR, WRONG_STATE };
typedef struct Status { int32_t kind, code; int64_t bytes; char text[240]; } Status;

int fail(Status *status, int kind, int code, int64_t bytes, const char *format, ...);

// Every function returns 0 or the driver's own error code.
typedef struct Driver Driver;
struct Driver {
    const char *name;
    void *library, *calls;
    int (*enter)(Driver *, int device);      // makes the device current in this thread, until leave
    void (*leave)(Driver *);
    int (*synchronize)(Driver *);            // all that was queued on the device has ended
    int (*granularity)(Driver *, int device, size_t *bytes);
    int (*total)(Driver *, int device, size_t *bytes);
    int (*reserve)(Driver *, uint64_t *address, size_t bytes);
    int (*unreserve)(Driver *, uint64_t address, size_t bytes);
    int (*create)(Driver *, int device, size_t bytes, uint64_t *handle);
    int (*release)(Driver *, uint64_t handle);
    int (*map)(Driver *, int device, uint64_t address, size_t bytes, uint64_t handle);      // readable and writable, or not mapped at all
    int (*unmap)(Driver *, uint64_t address, size_t bytes);
    int (*stream_create)(Driver *, void **stream);
    int (*stream_wait)(Driver *, void *stream);
    int (*stream_destroy)(Driver *, void *stream);
    int (*event_record)(Driver *, void **event, void *stream);      // a new event
    int (*event_wait)(Driver *, void *event);
    int (*event_destroy)(Driver *, void *event);
    int (*to_host)(Driver *, void *host, uint64_t address, size_t bytes, void *stream);
    int (*to_device)(Driver *, uint64_t address, void *host, size_t bytes, void *stream);
    int (*host_alloc)(Driver *, size_t bytes, void **data, bool *pinned);      // plain memory, touched, if pinning is refused
    void (*host_free)(Driver *, void *data, size_t bytes, bool pinned);
    const char *(*describe)(Driver *, int code);
    bool (*is_full)(int code);               // the device has no memory left
};

int cuda_open(Driver *, const char *path, Status *);
int acl_open(Driver *, const char *path, Status *);
int plain_alloc(size_t bytes, void **data);      // 2 MiB aligned and touched; 0 or errno
void plain_free(void *data, size_t bytes);

// Host memory, in chunks that are made ready by threads of their own, kept and used again.
enum { EMPTY, BUSY, READY, FAILED };
typedef struct Chunk { void *data; int state; bool pinned, used; } Chunk;
typedef struct Host {
    Driver *driver;
    int device, threads, running;
    int64_t chunk_bytes;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Chunk **chunks;
    int count, error;
    bool closing;
} Host;

int host_acquire(Host *, int64_t count, Chunk **out, Status *);      // for use, soon ready
int host_wait(Host *, Chunk *, Status *);
void host_return(Host *, Chunk **chunks, int64_t count);

typedef struct Piece {      // of physical memory
    int64_t offset, size;
    uint64_t handle;
    int live;               // allocations that touch it
    bool created, mapped;
    bool fresh;             // mapped anew since the last pause: what was kept has to be copied in
} Piece;

typedef struct Allocation { int64_t offset, size; } Allocation;
typedef struct Copy { int64_t offset, size; void *host; Chunk *chunk; } Copy;

typedef struct Region {
    Driver *driver;
    int device, slot;
    uint64_t base;
    int64_t span, step, largest;      // bytes: reserved, of the grid of pieces, of the largest piece
    Piece **at;                       // by address / step; neighbours may share a piece
    Allocation *allocations;          // by offset
    int64_t allocated, num_allocations, room;
    Copy *copies;                     // while paused: what is kept, by offset
    int64_t num_copies;
    Host *host;
    Chunk **chunks;
    int64_t num_chunks;
    bool paused, closing;
    Status failure;                   // of the last allocation that failed
    pthread_mutex_t lock;
} Region;

int piece_map(Region *, Piece *, Status *);        // creates, too, unless that was done; on failure nothing is left
int piece_unmap(Region *, Piece *, Status *);      // and releases
void forget_copies(Region *);                      // their chunks are free again
static inline int64_t steps(const Region *region) { return region->span / region->step; }
static inline Piece *piece_first(const Region *region, int64_t index)      // the piece that begins here
{
    Piece *piece = region->at[index];
    return piece && piece->offset == index * region->step ? piece : NULL;
}
