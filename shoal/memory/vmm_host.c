// Host memory for the content of paused regions. Background threads pin it in chunks before it is needed.
// Later pauses reuse the chunks.
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "vmm.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#define HUGE (2ll << 20)

int plain_alloc(size_t bytes, void **data)
{
    char *all = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED)
        return errno;
    size_t lead = -(uintptr_t)all % HUGE;
    if (lead)
        munmap(all, lead);
    munmap(all + lead + bytes, HUGE - lead);
    *data = all + lead;
    madvise(*data, bytes, MADV_HUGEPAGE);      // It may fail: then there is more to touch and to pin.
    madvise(*data, bytes, MADV_DONTFORK);
    if (madvise(*data, bytes, MADV_POPULATE_WRITE)) {
        if (errno != EINVAL) {
            int code = errno;
            plain_free(*data, bytes);
            return code;
        }
        memset(*data, 0, bytes);               // The system's kernel is older than 5.14.
    }
    return 0;
}

void plain_free(void *data, size_t bytes) { munmap(data, bytes); }

static void *worker(void *argument)
{
    Host *host = argument;
    Driver *driver = host->driver;
    bool entered = !driver->enter(driver, host->device);
    pthread_mutex_lock(&host->lock);
    for (;;) {
        Chunk *chunk = NULL;
        for (int i = 0; i < host->count && !chunk && !host->closing; i++)
            if (host->chunks[i]->state == EMPTY)
                chunk = host->chunks[i];
        if (!chunk)
            break;
        chunk->state = BUSY;
        pthread_mutex_unlock(&host->lock);
        int code = host->driver->host_alloc(host->driver, host->chunk_bytes, &chunk->data, &chunk->pinned);
        pthread_mutex_lock(&host->lock);
        chunk->state = code ? FAILED : READY;
        host->error = code ? code : host->error;
        pthread_cond_broadcast(&host->changed);
    }
    host->running--;
    pthread_cond_broadcast(&host->changed);
    pthread_mutex_unlock(&host->lock);      // From here on shoal_host_close may free `host`.
    if (entered)
        driver->leave(driver);
    return NULL;
}

// Allocates chunks up to `count`, and starts threads to prepare them. Chunks that failed are tried again. The caller holds the lock.
static int grow(Host *host, int64_t count)
{
    if (count > host->count) {
        Chunk **chunks = realloc(host->chunks, count * sizeof *chunks);
        if (!chunks)
            return -1;
        host->chunks = chunks;
        for (; host->count < count; host->count++)
            if (!(chunks[host->count] = calloc(1, sizeof(Chunk))))
                return -1;
    }
    int empty = 0;
    for (int i = 0; i < host->count; i++) {
        if (host->chunks[i]->state == FAILED)
            host->chunks[i]->state = EMPTY;
        empty += host->chunks[i]->state == EMPTY;
    }
    while (host->running < host->threads && host->running < empty) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, host))
            return host->running ? 0 : -1;
        pthread_detach(thread);
        host->running++;
    }
    return 0;
}

Host *shoal_host_open(Driver *driver, int device, int64_t chunk_bytes, int threads)
{
    Host *host = calloc(1, sizeof *host);
    *host = (Host){.driver = driver, .device = device, .chunk_bytes = chunk_bytes, .threads = threads};
    pthread_mutex_init(&host->lock, NULL);
    pthread_cond_init(&host->changed, NULL);
    return host;
}

int shoal_host_prepare(Host *host, int64_t bytes, Status *status)
{
    pthread_mutex_lock(&host->lock);
    int code = grow(host, (bytes + host->chunk_bytes - 1) / host->chunk_bytes);
    pthread_mutex_unlock(&host->lock);
    return code ? fail(status, HOST_MEMORY, 0, bytes, "no memory or threads to prepare host buffers") : 0;
}

// Waits until every chunk is ready or has failed.
void shoal_host_wait(Host *host)
{
    pthread_mutex_lock(&host->lock);
    while (host->running)
        pthread_cond_wait(&host->changed, &host->lock);
    pthread_mutex_unlock(&host->lock);
}

typedef struct HostUsage { int64_t bytes, ready, pinned, used, failed; } HostUsage;

void shoal_host_usage(Host *host, HostUsage *usage)
{
    *usage = (HostUsage){0};
    pthread_mutex_lock(&host->lock);
    for (int i = 0; i < host->count; i++) {
        Chunk *chunk = host->chunks[i];
        usage->bytes += host->chunk_bytes;
        usage->ready += chunk->state == READY ? host->chunk_bytes : 0;
        usage->pinned += chunk->state == READY && chunk->pinned ? host->chunk_bytes : 0;
        usage->used += chunk->used ? host->chunk_bytes : 0;
        usage->failed += chunk->state == FAILED ? host->chunk_bytes : 0;
    }
    pthread_mutex_unlock(&host->lock);
}

static void empty_chunk(Host *host, Chunk *chunk)
{
    if (chunk->state == READY)
        host->driver->host_free(host->driver, chunk->data, host->chunk_bytes, chunk->pinned);
    free(chunk);
}

// Returns unused chunks to the system.
void shoal_host_trim(Host *host)
{
    bool entered = !host->driver->enter(host->driver, host->device);
    pthread_mutex_lock(&host->lock);
    int kept = 0;
    for (int i = 0; i < host->count; i++) {
        Chunk *chunk = host->chunks[i];
        if (chunk->used || chunk->state == BUSY)
            host->chunks[kept++] = chunk;
        else
            empty_chunk(host, chunk);
    }
    host->count = kept;
    pthread_mutex_unlock(&host->lock);
    if (entered)
        host->driver->leave(host->driver);
}

// Frees everything. No chunk may be in use.
void shoal_host_close(Host *host)
{
    pthread_mutex_lock(&host->lock);
    host->closing = true;
    while (host->running)
        pthread_cond_wait(&host->changed, &host->lock);
    pthread_mutex_unlock(&host->lock);
    shoal_host_trim(host);
    free(host->chunks);
    free(host);
}

int host_acquire(Host *host, int64_t count, Chunk **out, Status *status)
{
    int64_t found = 0, unused = 0;
    pthread_mutex_lock(&host->lock);
    for (int i = 0; i < host->count; i++)
        unused += !host->chunks[i]->used;
    int code = grow(host, host->count + (count > unused ? count - unused : 0));
    for (int ready = 1; ready >= 0 && !code; ready--)
        for (int i = 0; i < host->count && found < count; i++)
            if (!host->chunks[i]->used && (host->chunks[i]->state == READY) == ready) {
                out[found++] = host->chunks[i];
                host->chunks[i]->used = true;
            }
    pthread_mutex_unlock(&host->lock);
    return code ? fail(status, HOST_MEMORY, 0, count * host->chunk_bytes, "no memory or threads to prepare host buffers") : 0;
}

int host_wait(Host *host, Chunk *chunk, Status *status)
{
    pthread_mutex_lock(&host->lock);
    while (chunk->state == EMPTY || chunk->state == BUSY)
        pthread_cond_wait(&host->changed, &host->lock);
    int failed = chunk->state == FAILED ? host->error : 0;
    pthread_mutex_unlock(&host->lock);
    return failed ? fail(status, HOST_MEMORY, failed, host->chunk_bytes, "no host memory: %s", strerror(failed)) : 0;
}

void host_return(Host *host, Chunk **chunks, int64_t count)
{
    pthread_mutex_lock(&host->lock);
    for (int64_t i = 0; i < count; i++)
        chunks[i]->used = false;
    pthread_mutex_unlock(&host->lock);
}
