// A driver with graphs of kernels and memsets, for test_layer_copies.py: each node depends on the one before.
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1000, BUFFER = 1, BUFFER_SIZE = 2 };

typedef struct { unsigned char from, to, type, reserved[5]; } Edge;
typedef struct {
    void *function;
    unsigned grid[3], block[3], shared;
    void **params, **extra;
    void *kernel, *context;
} Kernel;
typedef struct { uint64_t address; size_t pitch; unsigned value, size; size_t width, height; } Memset;
typedef struct Node { struct Node *before; Edge edge; Kernel kernel; int attributes; bool is_set; Memset set; } Node;
typedef struct { int capturing; Node *last; Edge next; int num_nodes; Node *nodes[MOST]; } Stream;
// A function's parameters: an address and, as in a descriptor for TMA, 128 bytes that begin with one, and an int.
static const size_t sizes[] = {8, 128, 4};
enum { NUM = 3, OF_ALL = 8 + 128 + 4 };

static Node *new_node(Stream *stream, const Kernel *kernel)
{
    Node *node = calloc(1, sizeof(Node));
    node->kernel = *kernel;
    if (kernel->params) {
        node->kernel.params = calloc(NUM, sizeof(void *));
        for (int i = 0; i < NUM; i++)
            node->kernel.params[i] = memcpy(malloc(sizes[i]), kernel->params[i], sizes[i]);
    } else {
        size_t *size = malloc(sizeof(size_t));
        void **extra = calloc(5, sizeof(void *));
        *size = *(size_t *)kernel->extra[3];
        extra[0] = (void *)BUFFER;
        extra[1] = memcpy(malloc(*size), kernel->extra[1], *size);
        extra[2] = (void *)BUFFER_SIZE;
        extra[3] = size;
        node->kernel.extra = extra;
    }
    return stream->nodes[stream->num_nodes++] = node;
}

Stream *fake_stream(void)
{
    Stream *stream = calloc(1, sizeof(Stream));
    stream->capturing = 1;
    return stream;
}

// With `as_buffer` the parameters are given as one.
void fake_launch(Stream *stream, void *function, unsigned grid, uint64_t address, uint64_t described, int number, int as_buffer)
{
    uint64_t descriptor[16] = {described, 7, 9};
    void *params[NUM] = {&address, descriptor, &number};
    char buffer[OF_ALL];
    size_t size = OF_ALL;
    void *extra[] = {(void *)BUFFER, buffer, (void *)BUFFER_SIZE, &size, NULL};
    memcpy(buffer, &address, 8);
    memcpy(buffer + 8, descriptor, 128);
    memcpy(buffer + 136, &number, 4);
    Kernel kernel = {.function = function, .grid = {grid, 1, 1}, .block = {32, 1, 1}};
    if (as_buffer)
        kernel.extra = extra;
    else
        kernel.params = params;
    Node *node = new_node(stream, &kernel);
    node->before = stream->last;
    node->edge = (Edge){.type = 1};
    node->attributes = 5;
    stream->last = node;
}

static Node *new_set(Stream *stream, const Memset *set)
{
    Node *node = calloc(1, sizeof(Node));
    node->is_set = true;
    node->set = *set;
    return stream->nodes[stream->num_nodes++] = node;
}

void fake_set(Stream *stream, uint64_t address, size_t width)
{
    Node *node = new_set(stream, &(Memset){.address = address, .size = 1, .width = width, .height = 1});
    node->before = stream->last;
    stream->last = node;
}

int fake_nodes(Stream *stream, uint64_t *out)
{
    int count = 0;
    for (Node *node = stream->last; node; node = node->before, count++) {
        uint64_t *row = out + 6 * count;
        if (node->is_set) {
            memcpy(row, (uint64_t[6]){2, node->set.address, node->set.width, node->set.size, node->set.height, node->edge.type}, 48);
            continue;
        }
        row[0] = (uint64_t)node->kernel.function;
        row[1] = node->kernel.grid[0];
        void **params = node->kernel.params;
        char *buffer = params ? NULL : node->kernel.extra[1];
        int number;
        memcpy(&row[2], params ? params[0] : buffer, 8);
        memcpy(&row[3], params ? params[1] : buffer + 8, 8);
        memcpy(&number, params ? params[2] : buffer + 136, 4);
        row[4] = number;
        row[5] = 10 * node->attributes + node->edge.type;
    }
    return count;
}

int cuStreamGetCaptureInfo_v3(Stream *stream, int *status, uint64_t *id, void **graph, Node *const **nodes, const Edge **edges,
                              size_t *count)
{
    *status = stream->capturing;
    *id = 1;
    *graph = stream;
    *nodes = &stream->last;
    *edges = &stream->next;
    *count = stream->last != NULL;
    return 0;
}

int cuStreamUpdateCaptureDependencies_v2(Stream *stream, Node **nodes, const Edge *edges, size_t count, unsigned flags)
{
    if (count != 1 || flags != 1 || !edges)
        return 1;
    stream->last = nodes[0];
    return 0;
}

int cuGraphNodeGetDependencies_v2(Node *node, Node **before, Edge *edges, size_t *count)
{
    before[0] = node->before;
    edges[0] = node->edge;
    *count = node->before != NULL;
    return 0;
}

int cuGraphNodeGetType(Node *node, int *type) { *type = node->is_set ? 2 : 0; return 0; }
int cuGraphMemsetNodeGetParams(Node *node, Memset *set) { *set = node->set; return 0; }
int cuCtxGetCurrent(void **context) { *context = NULL; return 0; }
int cuGraphKernelNodeGetParams_v2(Node *node, Kernel *kernel) { *kernel = node->kernel; return 0; }
int cuGraphKernelNodeCopyAttributes(Node *to, Node *from) { to->attributes = from->attributes; return 0; }

int cuGraphAddKernelNode_v2(Node **node, Stream *graph, Node *const *before, size_t count, const Kernel *kernel)
{
    (void)before;
    *node = new_node(graph, kernel);
    return count != 0;
}

int cuGraphAddMemsetNode(Node **node, Stream *graph, Node *const *before, size_t count, const Memset *set, void *context)
{
    (void)before, (void)context;
    *node = new_set(graph, set);
    return count != 0;
}

int cuGraphAddDependencies_v2(Stream *graph, Node *const *from, Node *const *to, const Edge *edges, size_t count)
{
    (void)graph;
    to[0]->before = from[0];
    to[0]->edge = edges[0];
    return count != 1;
}

int cuFuncGetParamInfo(void *function, size_t i, size_t *offset, size_t *size)
{
    (void)function;
    if (i >= NUM)
        return 1;
    *offset = 0;
    *size = sizes[i];
    return 0;
}

int cuKernelGetParamInfo(void *kernel, size_t i, size_t *offset, size_t *size) { return cuFuncGetParamInfo(kernel, i, offset, size); }
