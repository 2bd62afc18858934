// Regions of device memory whose physical pieces can be freed and mapped again at the same addresses.
// Building this needs neither CUDA nor CANN: drivers are opened at run time, behind one table of functions.
#pragma once
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stddef.h>

// The error of a call. The caller owns it, so that no call sees the failure of another.
enum { OK, DEVICE_MEMORY, HOST_MEMORY, DRIVER_ERROR, WRONG_STATE };
typedef struct Status { int32_t kind, code; int64_t bytes; char text[240]; } Status;

int fail(Status *status, int kind, int code, int64_t bytes, const char *format, ...);

// Every function returns 0 or the driver's own error code.
typedef struct Driver Driver;
struct Driver {
    const char *name;
    void *library, *calls;
    int (*enter)(Driver *, int device);      // makes the device current in this thread, until `leave`
    void (*leave)(Driver *);
    int (*synchronize)(Driver *);            // waits until everything that was queued on the device has ended
    int (*granularity)(Driver *, int device, size_t *bytes);
    int (*total)(Driver *, int device, size_t *bytes);
    int (*reserve)(Driver *, uint64_t *address, size_t bytes);
    int (*unreserve)(Driver *, uint64_t address, size_t bytes);
    int (*create)(Driver *, int device, size_t bytes, uint64_t *handle);
    int (*release)(Driver *, uint64_t handle);
    // On success the memory is readable and writable; on failure it is not mapped.
    int (*map)(Driver *, int device, uint64_t address, size_t bytes, uint64_t handle);
    int (*unmap)(Driver *, uint64_t address, size_t bytes);
    int (*stream_create)(Driver *, void **stream);
    int (*stream_wait)(Driver *, void *stream);
    int (*stream_destroy)(Driver *, void *stream);
    int (*event_record)(Driver *, void **event, void *stream);      // makes a new event
    int (*event_wait)(Driver *, void *event);
    int (*event_destroy)(Driver *, void *event);
    int (*to_host)(Driver *, void *host, uint64_t address, size_t bytes, void *stream);
    int (*to_device)(Driver *, uint64_t address, void *host, size_t bytes, void *stream);
    // If pinning is refused, this is plain memory. In both cases its pages have been touched.
    int (*host_alloc)(Driver *, size_t bytes, void **data, bool *pinned);
    void (*host_free)(Driver *, void *data, size_t bytes, bool pinned);
    const char *(*describe)(Driver *, int code);
    bool (*is_full)(int code);               // whether the code means that the device has no memory left
};

int cuda_open(Driver *, const char *path, Status *);
int acl_open(Driver *, const char *path, Status *);
int plain_alloc(size_t bytes, void **data);      // aligned to 2 MiB, pages touched; returns 0 or errno
void plain_free(void *data, size_t bytes);

// Host memory in chunks. Background threads prepare them, and later pauses reuse them.
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

int host_acquire(Host *, int64_t count, Chunk **out, Status *);      // the chunks may not be ready yet
int host_wait(Host *, Chunk *, Status *);
void host_return(Host *, Chunk **chunks, int64_t count);

typedef struct Piece {      // of physical memory
    int64_t offset, size;
    uint64_t handle;
    int live;               // how many allocations touch it
    bool created, mapped;
    bool fresh;             // It was mapped again since the last pause, so kept content must be copied in.
} Piece;

typedef struct Allocation { int64_t offset, size; } Allocation;
typedef struct Copy { int64_t offset, size; void *host; Chunk *chunk; } Copy;

typedef struct Region {
    Driver *driver;
    int device, slot;
    uint64_t base;
    int64_t span, step, largest;      // bytes that are reserved, of a step of the grid, of the largest piece
    Piece **at;                       // the piece of each step of the grid; neighbours may share a piece
    Allocation *allocations;          // in order of offset
    int64_t allocated, num_allocations, room;
    Copy *copies;                     // the content that is kept while the region is paused, in order of offset
    int64_t num_copies;
    Host *host;
    Chunk **chunks;
    int64_t num_chunks;
    bool paused, closing;
    Status failure;                   // why the last failed allocation failed
    pthread_mutex_t lock;
} Region;

int piece_map(Region *, Piece *, Status *);        // Creates the piece first if need be. A failure leaves nothing.
int piece_unmap(Region *, Piece *, Status *);      // Also releases the physical memory.
void forget_copies(Region *);                      // Their chunks are free again.
static inline int64_t steps(const Region *region) { return region->span / region->step; }
static inline Piece *piece_first(const Region *region, int64_t index)      // the piece that begins at this step
{
    Piece *piece = region->at[index];
    return piece && piece->offset == index * region->step ? piece : NULL;
}
