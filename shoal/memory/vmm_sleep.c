// Pause and resume. Copies run on several streams, while other threads unmap or map pieces.
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "vmm.h"

#define MAX_THREADS 16
#define MAX_STREAMS 8

typedef struct Range { uint64_t address; int64_t size; } Range;
typedef struct Job {            // a region to pause or to resume; only a pause reads the other fields
    Region *region;
    int32_t keep;               // whether content is kept
    const Range *ranges;        // what is kept, in order of address
    int64_t num_ranges;         // -1: every allocation is kept
} Job;
typedef struct Moved {
    int64_t freed, taken, copied;      // bytes
    double queued, pieces, end;        // seconds until copies were queued, pieces were (un)mapped, and all was done
} Moved;

enum { WAITING, DONE, BROKEN };
typedef struct Unit {           // a piece, with the copies that touch it
    Region *region;
    Piece *piece;
    int64_t first, end;
    void *event;
    atomic_int state;
    bool was_mapped;
} Unit;

typedef struct Crew {
    Unit *units;
    int64_t count;
    bool mapping;
    atomic_llong next;
    atomic_bool stop;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Status status;              // why the first unit that broke did so
} Crew;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static int driver_failed(Region *region, int code, const char *step, Status *status)
{
    Driver *driver = region->driver;
    return fail(status, DRIVER_ERROR, code, 0, "%s: device %d: %s (%s error %d)", step, region->device, driver->describe(driver, code),
                driver->name, code);
}

static int work(Crew *crew, Unit *unit, Status *status)
{
    Region *region = unit->region;
    Driver *driver = region->driver;
    int code = driver->enter(driver, region->device);
    if (code)
        return driver_failed(region, code, "the device", status);
    if (crew->mapping)
        code = unit->was_mapped ? 0 : piece_map(region, unit->piece, status);
    else if (unit->event && (code = driver->event_wait(driver, unit->event)))
        driver_failed(region, code, "copying to the host", status);
    else
        code = piece_unmap(region, unit->piece, status);
    driver->leave(driver);
    return code;
}

static void *worker(void *argument)
{
    Crew *crew = argument;
    for (;;) {
        int64_t i = atomic_fetch_add(&crew->next, 1);
        if (i >= crew->count)
            return NULL;
        Status status = {0};
        int code = crew->stop ? -1 : work(crew, &crew->units[i], &status);
        pthread_mutex_lock(&crew->lock);
        if (code && !crew->stop)
            crew->status = status;
        crew->stop = crew->stop || code;
        crew->units[i].state = code ? BROKEN : DONE;
        pthread_cond_broadcast(&crew->changed);
        pthread_mutex_unlock(&crew->lock);
    }
}

static int start(Crew *crew, pthread_t *threads, int wanted)
{
    int count = 0;
    while (count < wanted && count < MAX_THREADS && count < crew->count && !pthread_create(&threads[count], NULL, worker, crew))
        count++;
    if (!count)
        worker(crew);      // There are no threads to be had, so this one does the work.
    return count;
}

static void finish(pthread_t *threads, int count)
{
    while (count)
        pthread_join(threads[--count], NULL);
}

typedef struct Streams { Region *region; void *of[MAX_STREAMS]; int count; } Streams;

static int streams_open(Streams *streams, Region *region, int count, Status *status)
{
    *streams = (Streams){.region = region};
    Driver *driver = region->driver;
    int code = driver->enter(driver, region->device);
    if (code)
        return driver_failed(region, code, "the device", status);
    while (!code && streams->count < count && streams->count < MAX_STREAMS)
        if (!(code = driver->stream_create(driver, &streams->of[streams->count])))
            streams->count++;
    driver->leave(driver);
    return code ? driver_failed(region, code, "a stream", status) : 0;
}

static int streams_close(Streams *streams, Status *status)      // It waits for the streams first.
{
    Driver *driver = streams->region->driver;
    int bad = 0;
    if (!streams->count)
        return 0;
    int entered = !driver->enter(driver, streams->region->device);
    for (int i = 0; i < streams->count; i++) {
        int code = driver->stream_wait(driver, streams->of[i]);
        bad = bad ? bad : code;
        driver->stream_destroy(driver, streams->of[i]);
    }
    if (entered)
        driver->leave(driver);
    streams->count = 0;
    return bad ? driver_failed(streams->region, bad, "copying", status) : 0;
}

// Lists the copies of kept content, split at the ends of pieces and chunks, and placed in chunks one after
// the other.
static int plan(Job *job, Host *host, Status *status)
{
    Region *region = job->region;
    int64_t total = 0, all = job->num_ranges < 0, count = all ? region->num_allocations : job->num_ranges;
    for (int64_t i = 0; i < count; i++)
        total += all ? region->allocations[i].size : job->ranges[i].size;
    int64_t chunks = (total + host->chunk_bytes - 1) / host->chunk_bytes;
    region->copies = calloc(chunks + count + 2 * steps(region) + 1, sizeof *region->copies);
    region->chunks = calloc(chunks + 1, sizeof *region->chunks);
    if (!region->copies || !region->chunks)
        return fail(status, HOST_MEMORY, 0, total, "no host memory for bookkeeping");
    region->host = host;
    if (host_acquire(host, chunks, region->chunks, status))
        return -1;
    region->num_chunks = chunks;
    int64_t packed = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t offset = all ? region->allocations[i].offset : (int64_t)(job->ranges[i].address - region->base);
        int64_t left = all ? region->allocations[i].size : job->ranges[i].size;
        while (left > 0) {
            Piece *piece = offset >= 0 && offset < region->span ? region->at[offset / region->step] : NULL;
            if (!piece || !piece->mapped)
                return fail(status, WRONG_STATE, 0, left, "a range to keep lies outside the region's memory");
            int64_t room = host->chunk_bytes - packed % host->chunk_bytes, size = piece->offset + piece->size - offset;
            size = size < room ? size : room;
            size = size < left ? size : left;
            region->copies[region->num_copies++] = (Copy){offset, size, (void *)(packed % host->chunk_bytes),
                                                          region->chunks[packed / host->chunk_bytes]};
            offset += size, left -= size, packed += size;
        }
    }
    return 0;
}

// Lists the pieces of the regions. Pieces with copies come first, or last.
static Unit *list_units(Job *jobs, int n, bool copies_first, int64_t *count)
{
    int64_t most = 1;
    for (int i = 0; i < n; i++)
        most += steps(jobs[i].region);
    Unit *units = calloc(most, sizeof *units);
    *count = 0;
    for (int pass = 0; units && pass < 2; pass++)
        for (int i = 0; i < n; i++) {
            Region *region = jobs[i].region;
            int64_t copy = 0;
            for (int64_t j = 0; j < steps(region); j++) {
                Piece *piece = piece_first(region, j);
                if (!piece)
                    continue;
                while (copy < region->num_copies && region->copies[copy].offset < piece->offset)
                    copy++;
                int64_t first = copy;
                while (copy < region->num_copies && region->copies[copy].offset < piece->offset + piece->size)
                    copy++;
                if ((first < copy) == (copies_first == (pass == 0)))
                    units[(*count)++] = (Unit){.region = region, .piece = piece, .first = first, .end = copy, .was_mapped = piece->mapped};
            }
        }
    return units;
}

static Streams *streams_of(Streams *streams, int n, Region *region)
{
    for (int i = 0; i < n; i++)
        if (streams[i].region == region)
            return &streams[i];
    return NULL;
}

// Maps all pieces that are not mapped, and copies kept content back. On failure, the pieces that were mapped
// here are unmapped again, and the kept content stays.
static int restore(Job *jobs, int n, int num_threads, int num_streams, Moved *moved, Status *status)
{
    double begin = now();
    Crew crew = {.mapping = true, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    Streams *streams = calloc(n, sizeof *streams);
    pthread_t threads[MAX_THREADS];
    crew.units = list_units(jobs, n, true, &crew.count);
    if (!crew.units || !streams) {
        free(crew.units), free(streams);
        return fail(status, HOST_MEMORY, 0, 0, "no host memory for bookkeeping");
    }
    int bad = 0;
    for (int i = 0; i < n && !bad; i++)
        if (jobs[i].region->num_copies)
            bad = streams_open(&streams[i], jobs[i].region, num_streams, status);
    int started = bad ? 0 : start(&crew, threads, num_threads);
    for (int64_t i = 0; i < crew.count && !bad; i++) {
        Unit *unit = &crew.units[i];
        if (unit->first == unit->end)
            break;      // Only units without copies follow.
        pthread_mutex_lock(&crew.lock);
        while (unit->state == WAITING)
            pthread_cond_wait(&crew.changed, &crew.lock);
        pthread_mutex_unlock(&crew.lock);
        if (unit->state == BROKEN)
            break;
        Region *region = unit->region;
        Driver *driver = region->driver;
        Streams *here = streams_of(streams, n, region);
        int code = driver->enter(driver, region->device), entered = !code;
        for (int64_t j = unit->first; j < unit->end && !code && unit->piece->fresh; j++) {
            Copy *copy = &region->copies[j];
            code = driver->to_device(driver, region->base + copy->offset, (char *)copy->chunk->data + (intptr_t)copy->host, copy->size,
                                     here->of[i % here->count]);
            moved->copied += copy->size;
        }
        if (entered)
            driver->leave(driver);
        if (code) {
            bad = driver_failed(region, code, "copying to the device", status);
            crew.stop = true;
        }
    }
    moved->queued = now() - begin;
    finish(threads, started);
    moved->pieces = now() - begin;
    for (int i = 0; i < n; i++) {
        Status other = {0};
        if (streams[i].region && streams_close(&streams[i], &other) && !bad && !crew.stop)
            bad = -1, *status = other;
    }
    if (!bad && crew.stop)
        bad = -1, *status = crew.status;
    for (int64_t i = 0; i < crew.count; i++) {
        Unit *unit = &crew.units[i];
        if (unit->was_mapped || !unit->piece->mapped)
            continue;
        Driver *driver = unit->region->driver;
        Status ignored;      // If unmapping fails, the piece stays mapped, and the next resume finds it so.
        if (!bad)
            moved->taken += unit->piece->size;
        else if (!driver->enter(driver, unit->region->device)) {
            piece_unmap(unit->region, unit->piece, &ignored);
            driver->leave(driver);
        }
    }
    free(crew.units), free(streams);
    moved->end = now() - begin;
    return bad;
}

static int copy_out(Job *jobs, int n, Crew *crew, Host *host, Streams *streams, int num_streams, Moved *moved, Status *status)
{
    for (int i = 0; i < n; i++)
        if (jobs[i].region->num_copies && streams_open(&streams[i], jobs[i].region, num_streams, status))
            return -1;
    for (int64_t i = 0; i < crew->count; i++) {
        Unit *unit = &crew->units[i];
        Region *region = unit->region;
        Driver *driver = region->driver;
        Streams *here = streams_of(streams, n, region);
        for (int64_t j = unit->first; j < unit->end; j++) {
            Copy *copy = &region->copies[j];
            if (host_wait(host, copy->chunk, status))
                return -1;
            int code = driver->enter(driver, region->device);
            if (!code) {
                code = driver->to_host(driver, (char *)copy->chunk->data + (intptr_t)copy->host, region->base + copy->offset, copy->size,
                                       here->of[i % here->count]);
                if (!code && j + 1 == unit->end)
                    code = driver->event_record(driver, &unit->event, here->of[i % here->count]);
                driver->leave(driver);
            }
            if (code)
                return driver_failed(region, code, "copying to the host", status);
            moved->copied += copy->size;
        }
    }
    return 0;
}

static void lock_all(Job *jobs, int n, bool lock)
{
    for (int i = 0; i < n; i++)
        (lock ? pthread_mutex_lock : pthread_mutex_unlock)(&jobs[i].region->lock);
}

// Pauses all of the regions or none. A region that is paused already loses its kept content, unless its job
// has `keep`.
//
// First the copies of all kept content are queued, into host memory that is ready. Only then are pieces
// unmapped, pieces with copies as soon as their copies have ended. If the driver fails in between, the
// unmapped pieces are mapped again, with their content. If that fails too, the region counts as paused, and
// `resume` can be tried.
int shoal_pause(Job *jobs, int n, Host *host, int num_threads, int num_streams, Moved *moved, Status *status)
{
    Crew crew = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    Streams *streams = calloc(n, sizeof *streams);
    Job *going = calloc(n, sizeof *going);
    pthread_t threads[MAX_THREADS];
    int bad = 0, num_going = 0;
    double begin = now();
    *moved = (Moved){0};
    lock_all(jobs, n, true);
    for (int i = 0; i < n; i++)
        if (!jobs[i].region->paused)
            going[num_going++] = jobs[i];
    for (int i = 0; i < num_going && !bad; i++) {      // First wait for kernels that use the memory.
        Region *region = going[i].region;
        int code = region->driver->enter(region->driver, region->device);
        if (!code) {
            code = region->driver->synchronize(region->driver);
            region->driver->leave(region->driver);
        }
        bad = code ? driver_failed(region, code, "waiting for the device", status) : going[i].keep ? plan(&going[i], host, status) : 0;
    }
    if (!bad && !(crew.units = list_units(going, num_going, false, &crew.count)))
        bad = fail(status, HOST_MEMORY, 0, 0, "no host memory for bookkeeping");
    for (int64_t i = 0; i < crew.count; i++)
        crew.units[i].piece->fresh = false;      // A piece that stays mapped, because its copy failed, is up to date.
    bad = bad ? bad : copy_out(going, num_going, &crew, host, streams, num_streams, moved, status);
    moved->queued = now() - begin;
    if (!bad)
        finish(threads, start(&crew, threads, num_threads));
    moved->pieces = now() - begin;
    for (int i = 0; i < num_going; i++) {
        Status other = {0};
        if (streams[i].region && streams_close(&streams[i], &other) && !bad && !crew.stop)
            bad = -1, *status = other;      // A copy is bad, so everything is undone below.
    }
    if (!bad && crew.stop)
        bad = -1, *status = crew.status;
    for (int64_t i = 0; i < crew.count; i++) {
        Unit *unit = &crew.units[i];
        moved->freed += unit->was_mapped && !unit->piece->mapped ? unit->piece->size : 0;
        if (unit->event && !unit->region->driver->enter(unit->region->driver, unit->region->device)) {
            unit->region->driver->event_destroy(unit->region->driver, unit->event);
            unit->region->driver->leave(unit->region->driver);
        }
    }
    bool stuck = false;
    if (bad) {
        Moved ignored = {0};
        Status other;
        stuck = moved->freed && restore(going, num_going, num_threads, num_streams, &ignored, &other);
        if (stuck)
            strncat(status->text, "; the region counts as paused", sizeof status->text - strlen(status->text) - 1);
        moved->freed = moved->copied = 0;
    }
    for (int i = 0; i < num_going; i++) {
        going[i].region->paused = !bad || stuck;
        if (bad && !stuck)
            forget_copies(going[i].region);
    }
    for (int i = 0; i < n && !bad; i++)
        if (!jobs[i].keep)
            forget_copies(jobs[i].region);
    lock_all(jobs, n, false);
    moved->end = now() - begin;
    free(crew.units), free(streams), free(going);
    return bad;
}

// Maps memory for all of the regions again, or for none, at the same addresses. Kept content is restored, the
// rest is undefined. A failed call can be repeated.
int shoal_resume(Job *jobs, int n, int num_threads, int num_streams, Moved *moved, Status *status)
{
    Job *coming = calloc(n, sizeof *coming);
    int num_coming = 0;
    *moved = (Moved){0};
    lock_all(jobs, n, true);
    for (int i = 0; i < n; i++)
        if (jobs[i].region->paused)
            coming[num_coming++] = jobs[i];
    int bad = restore(coming, num_coming, num_threads, num_streams, moved, status);
    for (int i = 0; i < num_coming && !bad; i++) {
        coming[i].region->paused = false;
        forget_copies(coming[i].region);
    }
    lock_all(jobs, n, false);
    free(coming);
    return bad;
}
