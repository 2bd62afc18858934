// Regions are ranges of addresses that hold PyTorch's segments. Pieces of physical memory back them.
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "vmm.h"

#define SLOTS 64
#define ALIGNMENT 512
#define SEGMENT (2ll << 20)

static Region *regions[SLOTS];      // An allocation finds its region by slot, a free by address.
static pthread_mutex_t regions_lock = PTHREAD_MUTEX_INITIALIZER;

int fail(Status *status, int kind, int code, int64_t bytes, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    *status = (Status){.kind = kind, .code = code, .bytes = bytes};
    vsnprintf(status->text, sizeof status->text, format, arguments);
    va_end(arguments);
    return -1;
}

static int refuse(Region *region, int code, int64_t bytes, const char *step, Status *status)
{
    Driver *driver = region->driver;
    return fail(status, driver->is_full(code) ? DEVICE_MEMORY : DRIVER_ERROR, code, bytes, "%s: device %d, %lld bytes: %s (%s error %d)",
                step, region->device, (long long)bytes, driver->describe(driver, code), driver->name, code);
}

Driver *shoal_driver_open(int ascend, const char *path, Status *status)
{
    Driver *driver = calloc(1, sizeof *driver);
    if ((ascend ? acl_open : cuda_open)(driver, path, status)) {
        free(driver);
        return NULL;
    }
    return driver;
}

int piece_map(Region *region, Piece *piece, Status *status)
{
    Driver *driver = region->driver;
    int code;
    if (!piece->created && (code = driver->create(driver, region->device, piece->size, &piece->handle)))
        return refuse(region, code, piece->size, "no physical memory", status);
    piece->created = true;
    if ((code = driver->map(driver, region->device, region->base + piece->offset, piece->size, piece->handle))) {
        refuse(region, code, piece->size, "mapping memory", status);
        piece->created = driver->release(driver, piece->handle) != 0;
        return -1;
    }
    piece->mapped = piece->fresh = true;
    return 0;
}

int piece_unmap(Region *region, Piece *piece, Status *status)
{
    Driver *driver = region->driver;
    int code = piece->mapped ? driver->unmap(driver, region->base + piece->offset, piece->size) : 0;
    if (code)
        return refuse(region, code, piece->size, "unmapping memory", status);
    piece->mapped = false;
    if (piece->created && (code = driver->release(driver, piece->handle)))
        return refuse(region, code, piece->size, "releasing memory", status);
    piece->created = false;
    return 0;
}

static void forget_piece(Region *region, Piece *piece)
{
    for (int64_t i = piece->offset / region->step; i < (piece->offset + piece->size) / region->step; i++)
        region->at[i] = NULL;
    free(piece);
}

// Backs [offset, offset + size) with physical memory. New pieces are as large as the request, within limits.
static int back(Region *region, int64_t offset, int64_t size, Status *status)
{
    int64_t first = offset / region->step, end = (offset + size - 1) / region->step + 1, most = region->largest / region->step;
    for (int64_t i = first; i < end; i++) {
        if (region->at[i] && (region->at[i]->mapped || !piece_map(region, region->at[i], status)))
            continue;
        if (region->at[i])
            return -1;
        int64_t count = 1;
        while (count < most && i + count < end && !region->at[i + count])
            count++;
        Piece *piece = calloc(1, sizeof *piece);
        *piece = (Piece){.offset = i * region->step, .size = count * region->step};
        for (int64_t j = i; j < i + count; j++)
            region->at[j] = piece;
        if (!piece_map(region, piece, status))
            continue;
        if (!piece->created)
            forget_piece(region, piece);
        for (int64_t j = first; j < i; j++) {      // A failed allocation leaves nothing.
            Piece *made = piece_first(region, j);
            Status ignored;
            if (made && !made->live && !piece_unmap(region, made, &ignored))
                forget_piece(region, made);
        }
        return -1;
    }
    return 0;
}

static void count_live(Region *region, int64_t offset, int64_t size, int change)
{
    Piece *last = NULL;
    for (int64_t i = offset / region->step; i <= (offset + size - 1) / region->step; i++)
        if (region->at[i] != last && (last = region->at[i]))
            last->live += change;
}

// Returns the offset of the gap that needs the fewest new pieces; of several such gaps, the smallest.
static int64_t find_gap(Region *region, int64_t size, int64_t alignment, int64_t *index)
{
    int64_t best = -1, best_missing = INT64_MAX, best_gap = INT64_MAX, begin = 0;
    for (int64_t i = 0; i <= region->num_allocations; i++) {
        bool last = i == region->num_allocations;
        int64_t end = last ? region->span : region->allocations[i].offset, offset = (begin + alignment - 1) / alignment * alignment;
        if (offset + size <= end) {
            int64_t missing = 0;
            for (int64_t j = offset / region->step; j <= (offset + size - 1) / region->step; j++)
                missing += !region->at[j] || !region->at[j]->mapped;
            if (missing < best_missing || (missing == best_missing && end - begin < best_gap))
                best = offset, best_missing = missing, best_gap = end - begin, *index = i;
        }
        begin = last ? end : end + region->allocations[i].size;
    }
    return best;
}

static uint64_t allocate(Region *region, int64_t size, Status *status)
{
    int64_t alignment = size >= SEGMENT ? SEGMENT : ALIGNMENT, index = 0;
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (region->paused || region->closing)
        return fail(status, WRONG_STATE, 0, size, "the region is %s", region->paused ? "paused: resume it first" : "closed"), 0;
    int64_t offset = find_gap(region, size, alignment, &index);
    if (offset < 0)
        return fail(status, DEVICE_MEMORY, 0, size, "no range of %lld bytes is left in a region of %lld", (long long)size,
                    (long long)region->span), 0;
    if (region->num_allocations == region->room) {
        int64_t room = region->room * 2 + 64;
        Allocation *larger = realloc(region->allocations, room * sizeof *larger);
        if (!larger)
            return fail(status, HOST_MEMORY, 0, size, "no host memory for bookkeeping"), 0;
        region->allocations = larger, region->room = room;
    }
    if (back(region, offset, size, status))
        return 0;
    memmove(region->allocations + index + 1, region->allocations + index, (region->num_allocations - index) * sizeof(Allocation));
    region->allocations[index] = (Allocation){offset, size};
    region->num_allocations++;
    region->allocated += size;
    count_live(region, offset, size, 1);
    return region->base + offset;
}

// The caller holds both locks and has made the device current. Kernels that use the memory may still be
// queued, because PyTorch frees a segment as if by cudaFree, which waits for the device. This waits too, but
// only before it unmaps a piece.
static void deallocate(Region *region, int64_t index)
{
    Allocation gone = region->allocations[index];
    region->num_allocations--;
    region->allocated -= gone.size;
    memmove(region->allocations + index, region->allocations + index + 1, (region->num_allocations - index) * sizeof(Allocation));
    count_live(region, gone.offset, gone.size, -1);
    bool waited = false;
    Status ignored;
    for (int64_t i = gone.offset / region->step; i <= (gone.offset + gone.size - 1) / region->step; i++) {
        Piece *piece = region->at[i];
        if (!piece || piece->live)
            continue;
        if (piece->mapped && !waited && region->driver->synchronize(region->driver))
            return;      // A capture is under way, or the device is lost. The piece stays for later allocations.
        waited = true;
        if (!piece_unmap(region, piece, &ignored))
            forget_piece(region, piece);
    }
}

void forget_copies(Region *region)
{
    if (region->num_chunks)
        host_return(region->host, region->chunks, region->num_chunks);
    free(region->copies), free(region->chunks);
    region->copies = NULL, region->chunks = NULL;
    region->num_copies = region->num_chunks = 0;
}

static void destroy(Region *region)      // The caller holds both locks.
{
    Driver *driver = region->driver;
    Status ignored;
    bool clean = true;
    if (!driver->enter(driver, region->device)) {
        driver->synchronize(driver);
        for (int64_t i = 0; i < steps(region); i++) {
            Piece *piece = piece_first(region, i);
            if (piece && !piece_unmap(region, piece, &ignored))
                forget_piece(region, piece);
            clean = clean && !region->at[i];
        }
        if (clean)
            driver->unreserve(driver, region->base, region->span);
        driver->leave(driver);
    }
    regions[region->slot] = NULL;
    free(region->allocations), free(region->at);
    pthread_mutex_unlock(&region->lock);
    free(region);
}

// `step` and `largest` are the bytes of the smallest and of the largest piece, rounded to multiples of the
// driver's granularity. `span` is the bytes of addresses to reserve. 0: twice the device's memory, because
// gaps between allocations may be too small for others.
Region *shoal_region_open(Driver *driver, int device, int64_t span, int64_t step, int64_t largest, Status *status)
{
    Region *region = calloc(1, sizeof *region);
    *region = (Region){.driver = driver, .device = device, .slot = -1};
    size_t granularity = 0, total = 0;
    int code = driver->enter(driver, device);
    if (!code) {
        if (!(code = driver->granularity(driver, device, &granularity)) && !(code = driver->total(driver, device, &total))) {
            region->step = (step + granularity - 1) / granularity * granularity;
            region->largest = largest > region->step ? largest / region->step * region->step : region->step;
            region->span = ((span ? span : 2 * (int64_t)total) + region->step - 1) / region->step * region->step;
            code = driver->reserve(driver, &region->base, region->span);
        }
        driver->leave(driver);
    }
    if (code) {
        refuse(region, code, region->span, "reserving addresses", status);
        free(region);
        return NULL;
    }
    region->at = calloc(steps(region), sizeof *region->at);
    pthread_mutex_init(&region->lock, NULL);
    pthread_mutex_lock(&regions_lock);
    for (int i = 0; i < SLOTS && region->slot < 0; i++)
        if (!regions[i])
            regions[region->slot = i] = region;
    pthread_mutex_unlock(&regions_lock);
    if (region->slot < 0) {
        driver->unreserve(driver, region->base, region->span);
        free(region->at), free(region);
        fail(status, WRONG_STATE, 0, 0, "this process has %d memory regions already; close some", SLOTS);
        return NULL;
    }
    return region;
}

// The region ends when its last allocation is freed. Kept content is dropped at once. Returns the bytes that
// are still allocated.
int64_t shoal_region_close(Region *region)
{
    pthread_mutex_lock(&regions_lock);
    pthread_mutex_lock(&region->lock);
    int64_t left = region->allocated;
    region->closing = true;
    forget_copies(region);
    if (!region->num_allocations)
        destroy(region);
    else
        pthread_mutex_unlock(&region->lock);
    pthread_mutex_unlock(&regions_lock);
    return left;
}

int shoal_region_slot(Region *region) { return region->slot; }

// Returns the error of the last failed allocation. `status` is OK if no allocation has failed since the last
// call.
void shoal_region_failure(Region *region, Status *status)
{
    pthread_mutex_lock(&region->lock);
    *status = region->failure;
    region->failure = (Status){0};
    pthread_mutex_unlock(&region->lock);
}

typedef struct RegionUsage { int64_t allocated, mapped, host, pieces, paused; } RegionUsage;

void shoal_region_usage(Region *region, RegionUsage *usage)
{
    pthread_mutex_lock(&region->lock);
    *usage = (RegionUsage){.allocated = region->allocated, .paused = region->paused};
    for (int64_t i = 0; i < region->num_copies; i++)
        usage->host += region->copies[i].size;
    for (int64_t i = 0; i < steps(region); i++) {
        Piece *piece = piece_first(region, i);
        usage->pieces += !!piece;
        usage->mapped += piece && piece->mapped ? piece->size : 0;
    }
    pthread_mutex_unlock(&region->lock);
}

// Fills in `allocated` and `mapped` for all regions of this process on a device, including closed regions that
// tensors still use.
void shoal_process_usage(Driver *driver, int device, RegionUsage *usage)
{
    *usage = (RegionUsage){0};
    pthread_mutex_lock(&regions_lock);
    for (int i = 0; i < SLOTS; i++) {
        if (!regions[i] || regions[i]->driver != driver || regions[i]->device != device)
            continue;
        RegionUsage one;
        shoal_region_usage(regions[i], &one);
        usage->allocated += one.allocated, usage->mapped += one.mapped;
    }
    pthread_mutex_unlock(&regions_lock);
}

void *shoal_region_malloc(Region *region, int64_t size, Status *status)
{
    Driver *driver = region->driver;
    pthread_mutex_lock(&region->lock);
    int code = driver->enter(driver, region->device);
    uint64_t address = 0;
    if (code)
        refuse(region, code, size, "the device", status);
    else {
        address = allocate(region, size, status);
        driver->leave(driver);
    }
    pthread_mutex_unlock(&region->lock);
    return (void *)address;
}

// PyTorch calls an allocator without naming a region. So each region has its own function to allocate,
// shoal_malloc_<slot>. All share shoal_free.
static void *slot_malloc(int slot, int64_t size, int device)
{
    pthread_mutex_lock(&regions_lock);
    Region *region = regions[slot];
    pthread_mutex_unlock(&regions_lock);
    Status status = {0};
    if (!region || size <= 0)
        return NULL;
    void *address = NULL;
    if (device != region->device)
        fail(&status, WRONG_STATE, 0, size, "a region of device %d was asked for memory of device %d", region->device, device);
    else
        address = shoal_region_malloc(region, size, &status);
    if (!address) {      // PyTorch turns NULL into its OutOfMemoryError, and regions.py adds the reason.
        pthread_mutex_lock(&region->lock);
        region->failure = status;
        pthread_mutex_unlock(&region->lock);
    }
    return address;
}

void shoal_free(void *pointer, size_t size, int device, void *stream)
{
    (void)size, (void)device, (void)stream;
    uint64_t address = (uint64_t)pointer;
    pthread_mutex_lock(&regions_lock);
    for (int i = 0; i < SLOTS; i++) {
        Region *region = regions[i];
        if (!region || address < region->base || address >= region->base + region->span)
            continue;
        pthread_mutex_lock(&region->lock);
        bool entered = !region->driver->enter(region->driver, region->device);
        for (int64_t j = 0; j < region->num_allocations; j++)
            if (region->base + region->allocations[j].offset == address) {
                deallocate(region, j);
                break;
            }
        if (entered)
            region->driver->leave(region->driver);
        if (region->closing && !region->num_allocations)
            destroy(region);
        else
            pthread_mutex_unlock(&region->lock);
        break;
    }
    pthread_mutex_unlock(&regions_lock);
}

#define ENTRY(n) void *shoal_malloc_##n(int64_t size, int device, void *stream) { (void)stream; return slot_malloc(0##n, size, device); }
#define EIGHT(n) ENTRY(n##0) ENTRY(n##1) ENTRY(n##2) ENTRY(n##3) ENTRY(n##4) ENTRY(n##5) ENTRY(n##6) ENTRY(n##7)
EIGHT(0) EIGHT(1) EIGHT(2) EIGHT(3) EIGHT(4) EIGHT(5) EIGHT(6) EIGHT(7)      // Names are octal, 00 to 77.
