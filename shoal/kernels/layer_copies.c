// Copies of a captured layer's kernels, and of the memory that cuBLAS sets for them, within a CUDA graph that is being
// captured (layer_copies.py). The declarations repeat the part of cuda.h that is used here, which belongs to CUDA's
// stable ABI, so that no header is needed.
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KERNEL = 0, MEMSET = 2, SET = 1, MAX_NODES = 64, MAX_PARAMS = 128, MAX_WORDS = 64, MAX_BYTES = 8192 };
enum { END, BUFFER, BUFFER_SIZE };      // keys of Kernel.extra
// Reasons why nodes cannot be copied: OTHER_TYPE and more are a node of another kind, DRIVER and more the driver's code.
enum {
    NO_PARAMS = 2, LARGE_PARAMS, MANY_WORDS, MANY_NODES, BRANCHES, NO_ROOM, NOT_LAST, OTHER_TYPE = 10, DRIVER = 1000
};

typedef struct { unsigned char from, to, type, reserved[5]; } Edge;
typedef struct {
    void *function;
    unsigned grid[3], block[3], shared;
    void **params, **extra;
    void *kernel, *context;
} Kernel;
typedef struct { uint64_t address; size_t pitch; unsigned value, size; size_t width, height; } Memset;
// `size` bytes at `start` belong to the captured layer.
typedef struct { uint64_t start, size; } Range;
// A word of a parameter that is an address in `range`.
typedef struct { int param, offset, range; } Word;
typedef struct {
    void *node;
    int type;           // KERNEL or MEMSET
    Kernel kernel;
    Memset set;         // It counts as the one parameter of its node.
    Edge edge;          // from the node before
    int num_params, num_words;
    bool is_buffer;     // All parameters were given as one buffer, which counts as one parameter here.
    void *params[MAX_PARAMS];
    size_t sizes[MAX_PARAMS];
    Word words[MAX_WORDS];
} Node;

#define CALLS(X) \
    X(cuStreamGetCaptureInfo_v3, (void *, int *, uint64_t *, void **, void *const **, const Edge **, size_t *)) \
    X(cuStreamUpdateCaptureDependencies_v2, (void *, void **, const Edge *, size_t, unsigned)) \
    X(cuGraphNodeGetDependencies_v2, (void *, void **, Edge *, size_t *)) X(cuGraphNodeGetType, (void *, int *)) \
    X(cuGraphKernelNodeGetParams_v2, (void *, Kernel *)) X(cuGraphKernelNodeCopyAttributes, (void *, void *)) \
    X(cuGraphAddKernelNode_v2, (void **, void *, void *const *, size_t, const Kernel *)) \
    X(cuGraphMemsetNodeGetParams, (void *, Memset *)) X(cuCtxGetCurrent, (void **)) \
    X(cuGraphAddMemsetNode, (void **, void *, void *const *, size_t, const Memset *, void *)) \
    X(cuGraphAddDependencies_v2, (void *, void *const *, void *const *, const Edge *, size_t)) \
    X(cuFuncGetParamInfo, (void *, size_t, size_t *, size_t *)) X(cuKernelGetParamInfo, (void *, size_t, size_t *, size_t *))

static struct {
#define FIELD(name, arguments) int (*name) arguments;
    CALLS(FIELD)
} cuda;

// Opens the driver at `path`. Returns the name of what is missing, or NULL.
const char *shoal_copies_open(const char *path)
{
    void *library = dlopen(path, RTLD_NOW);
    if (!library)
        return path;
#define FIND(name, arguments) \
    if (!(cuda.name = (int (*) arguments)dlsym(library, #name))) \
        return #name;
    CALLS(FIND)
    return NULL;
}

// Returns the only node that the next launch on the capturing `stream` would depend on, or NULL if there are none or
// several.
void *shoal_copies_last(void *stream)
{
    int status;
    uint64_t id;
    void *graph, *const *nodes;
    const Edge *edges;
    size_t count;
    if (cuda.cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, &nodes, &edges, &count) || status != 1)
        return NULL;
    return count == 1 ? nodes[0] : NULL;
}

// Finds the node's parameters and their sizes. Returns 0, or the reason why it cannot.
static int find_params(Node *node)
{
    int code = cuda.cuGraphNodeGetType(node->node, &node->type);
    node->kernel = (Kernel){0};
    node->is_buffer = false;
    if (code)
        return DRIVER + code;
    if (node->type == MEMSET) {
        node->params[0] = &node->set;
        node->sizes[0] = sizeof(Memset);
        node->num_params = 1;
        return (code = cuda.cuGraphMemsetNodeGetParams(node->node, &node->set)) ? DRIVER + code : 0;
    }
    if (node->type != KERNEL)
        return OTHER_TYPE + node->type;
    if ((code = cuda.cuGraphKernelNodeGetParams_v2(node->node, &node->kernel)))
        return DRIVER + code;
    node->num_params = 0;
    node->is_buffer = !node->kernel.params;
    if (node->is_buffer) {
        if (!node->kernel.extra)
            return NO_PARAMS;
        node->params[0] = NULL;
        node->sizes[0] = 0;
        for (void **at = node->kernel.extra; *at; at += 2)
            if ((uintptr_t)at[0] == BUFFER)
                node->params[0] = at[1];
            else if ((uintptr_t)at[0] == BUFFER_SIZE)
                node->sizes[0] = *(size_t *)at[1];
        node->num_params = 1;
        return !node->params[0] ? NO_PARAMS : node->sizes[0] > MAX_BYTES ? LARGE_PARAMS : 0;
    }
    for (int i = 0;; i++) {
        size_t offset, size;
        code = node->kernel.function ? cuda.cuFuncGetParamInfo(node->kernel.function, i, &offset, &size)
                                     : cuda.cuKernelGetParamInfo(node->kernel.kernel, i, &offset, &size);
        if (code)
            return i ? 0 : DRIVER + code;      // There is no further parameter.
        if (i == MAX_PARAMS || size > MAX_BYTES)
            return LARGE_PARAMS;
        node->params[i] = node->kernel.params[i];
        node->sizes[i] = size;
        node->num_params = i + 1;
    }
}

// Finds the node's parameters, and the addresses in them that belong to the layer.
static int describe(Node *node, void *handle, const Range *ranges, int num_ranges)
{
    node->node = handle;
    int code = find_params(node);
    node->num_words = 0;
    for (int i = 0; i < node->num_params && !code; i++)
        for (size_t at = 0; at + 8 <= node->sizes[i]; at += 8) {
            uint64_t word;
            memcpy(&word, (char *)node->params[i] + at, 8);
            for (int r = 0; r < num_ranges; r++) {
                if (word < ranges[r].start || word - ranges[r].start >= ranges[r].size)
                    continue;
                if (node->num_words == MAX_WORDS)
                    return MANY_WORDS;
                node->words[node->num_words++] = (Word){i, at, r};
                break;
            }
        }
    return code;
}

// Describes the chain of nodes after `first` up to `last`, in order; returns their number, or the negative reason why
// they cannot be copied.
static int chain(Node *nodes, void *first, void *last, const Range *ranges, int num_ranges)
{
    void *handles[MAX_NODES];
    Edge edges[MAX_NODES];
    int count = 0;
    for (void *at = last; at != first; count++) {
        void *before[2];
        Edge found[2];
        size_t num_before = 2;
        if (count == MAX_NODES)
            return -MANY_NODES;
        if (cuda.cuGraphNodeGetDependencies_v2(at, before, found, &num_before) || num_before != 1)
            return -BRANCHES;
        handles[count] = at;
        edges[count] = found[0];
        at = before[0];
    }
    for (int i = 0; i < count; i++) {
        int code = describe(&nodes[i], handles[count - 1 - i], ranges, num_ranges);
        if (code)
            return -code;
        nodes[i].edge = edges[count - 1 - i];
    }
    return count;
}

// Writes the node's parameters with the addresses of another layer, `starts`, into `bytes`, and their addresses into
// `params`.
static int moved(const Node *node, const Range *ranges, const uint64_t *starts, char *bytes, size_t room, void **params)
{
    size_t used = 0;
    for (int i = 0; i < node->num_params; i++) {
        used = (used + 127) / 128 * 128;
        if (used + node->sizes[i] > room)
            return NO_ROOM;
        params[i] = memcpy(bytes + used, node->params[i], node->sizes[i]);
        used += node->sizes[i];
    }
    for (int w = 0; w < node->num_words; w++) {
        uint64_t word, range = node->words[w].range;
        char *place = (char *)params[node->words[w].param] + node->words[w].offset;
        memcpy(&word, place, 8);
        word += starts[range] - ranges[range].start;
        memcpy(place, &word, 8);
    }
    return 0;
}

#define ROOM (32 << 10)

// Compares the captured nodes (`middle`, `last`] with what the copy of (`first`, `middle`] at `starts` would be. Returns
// 0 if they are equal, else a text in `why`.
int shoal_copies_compare(void *first, void *middle, void *last, const Range *ranges, int num_ranges, const uint64_t *starts,
                         char *why, int length)
{
    Node *nodes = malloc(2 * MAX_NODES * sizeof(Node)), *others = nodes + MAX_NODES;
    char *bytes = aligned_alloc(128, ROOM);
    void *params[MAX_PARAMS];
    int differs = 0;
    int count = chain(nodes, first, middle, ranges, num_ranges), other = chain(others, middle, last, ranges, num_ranges);
    if (count < 0 || count != other) {
        snprintf(why, length, "layers of %d and %d kernels (negative: why they cannot be read)", count, other);
        differs = 1;
    }
    for (int i = 0; i < count && !differs; i++) {
        const Kernel *a = &nodes[i].kernel, *b = &others[i].kernel;
        if (nodes[i].type != others[i].type || a->function != b->function || a->kernel != b->kernel ||
            memcmp(a->grid, b->grid, sizeof a->grid) || memcmp(a->block, b->block, sizeof a->block) ||
            a->shared != b->shared || nodes[i].num_params != others[i].num_params ||
            memcmp(nodes[i].sizes, others[i].sizes, nodes[i].num_params * sizeof(size_t)) ||
            memcmp(&nodes[i].edge, &others[i].edge, sizeof(Edge))) {
            snprintf(why, length, "kernel %d is another one", i);
            differs = 1;
            break;
        }
        if ((differs = moved(&nodes[i], ranges, starts, bytes, ROOM, params)))
            snprintf(why, length, "kernel %d has too many parameters", i);
        for (int p = 0; p < nodes[i].num_params && !differs; p++)
            for (size_t at = 0; at < nodes[i].sizes[p]; at++)
                if (((char *)params[p])[at] != ((char *)others[i].params[p])[at]) {
                    uint64_t was = 0, expected = 0, found = 0;
                    size_t start = at / 8 * 8, size = nodes[i].sizes[p] - start < 8 ? nodes[i].sizes[p] - start : 8;
                    memcpy(&was, (char *)nodes[i].params[p] + start, size);
                    memcpy(&expected, (char *)params[p] + start, size);
                    memcpy(&found, (char *)others[i].params[p] + start, size);
                    snprintf(why, length, "kernel %d of %d, parameter %d of %zu bytes at %zu: %#llx, expected %#llx, found %#llx",
                             i, count, p, nodes[i].sizes[p], start, (unsigned long long)was, (unsigned long long)expected,
                             (unsigned long long)found);
                    differs = 1;
                    break;
                }
    }
    free(bytes);
    free(nodes);
    return differs;
}

// Adds `num_copies` copies of the nodes (`first`, `last`] after `last`, on which the next launch on `stream` depends.
// Copy i has the addresses starts[i * num_ranges ...]. Returns the number of kernels of a copy, or the negative reason
// why there is none: below -1,000 the driver's code.
int shoal_copies_add(void *stream, void *first, void *last, const Range *ranges, int num_ranges, const uint64_t *starts,
                     int num_copies)
{
    int status, code = 0;
    uint64_t id;
    void *graph, *context, *const *deps, *params[MAX_PARAMS];
    const Edge *edges;
    size_t num_deps;
    if (cuda.cuCtxGetCurrent(&context) ||
        cuda.cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, &deps, &edges, &num_deps) || status != 1 ||
        num_deps != 1 || deps[0] != last)
        return -NOT_LAST;
    Edge next = edges ? edges[0] : (Edge){0};
    Node *nodes = malloc(MAX_NODES * sizeof(Node));
    char *bytes = aligned_alloc(128, ROOM);
    int count = chain(nodes, first, last, ranges, num_ranges);
    void *before = last;
    for (int copy = 0; copy < num_copies && count > 0 && !code; copy++)
        for (int i = 0; i < count && !code; i++) {
            Kernel kernel = nodes[i].kernel;
            void *node;
            void *extra[] = {(void *)BUFFER, bytes, (void *)BUFFER_SIZE, &nodes[i].sizes[0], END};
            kernel.params = nodes[i].is_buffer ? NULL : params;
            kernel.extra = nodes[i].is_buffer ? extra : NULL;
            if (moved(&nodes[i], ranges, starts + (size_t)copy * num_ranges, bytes, ROOM, params)) {
                code = NO_ROOM;
                break;
            }
            if (nodes[i].type == MEMSET) {
                code = cuda.cuGraphAddMemsetNode(&node, graph, NULL, 0, params[0], context);
            } else {
                code = cuda.cuGraphAddKernelNode_v2(&node, graph, NULL, 0, &kernel);
                code = code ? code : cuda.cuGraphKernelNodeCopyAttributes(node, nodes[i].node);
            }
            code = code ? code : cuda.cuGraphAddDependencies_v2(graph, &before, &node, &nodes[i].edge, 1);
            code = code ? code + DRIVER : 0;
            before = node;
        }
    if (count > 0 && !code && (code = cuda.cuStreamUpdateCaptureDependencies_v2(stream, &before, &next, 1, SET)))
        code += DRIVER;
    free(bytes);
    free(nodes);
    return code ? -code : count;
}
