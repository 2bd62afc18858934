// Speculation on the rows of the batch state. kernels/drafting/reference.py says what each function does.

#include <stdlib.h>
#include <string.h>

#include "cpu.h"

enum { TOKEN = 0, POSITION = 1, MAX_TOKENS = 8, NUM_DRAFTS = 9, PENDING = 11 };    // the same as Field in state.py
enum { MOST_PLACES = 256 };    // the same as in draft_rows.py
enum { REPORT_TOKENS, REPORT_VERIFIED, REPORT_DRAFTS, REPORT_FIRST, REPORT_SIZE };    // the same as Report in draft_rows.py

// The batch state's rows, with their drafts and tokens.
typedef struct {
    int32_t *table, *drafts, *history;
    const int32_t *earlier;    // the tokens of each history before the sequence's own
    int64_t table_stride;
    int32_t num_drafts, length;    // K and L
} DraftRows;

void shoal_begin_verification(const DraftRows *d, const int32_t *rows, int count, int queries, int32_t *tokens, int32_t *positions,
                              int32_t *token_rows, int32_t *kv_lens, int32_t *starts, int32_t *verified, int32_t *unverified,
                              int32_t *pending) {
    for (int b = 0; b < count; b++) {
        const int32_t row = rows[b], *fields = d->table + row * d->table_stride;
        int start = -1, n = 0, first = -1;
        if (row >= 0) {
            const int most = (fields[MAX_TOKENS] < queries ? fields[MAX_TOKENS] : queries) - 1;
            start = fields[POSITION];
            n = fields[NUM_DRAFTS] < most ? fields[NUM_DRAFTS] : most;
            n = n > 0 ? n : 0;
            if (fields[NUM_DRAFTS] && !n) first = d->drafts[(int64_t)row * d->num_drafts];
        }
        kv_lens[b] = start + 1 + n, starts[b] = start, verified[b] = n, unverified[b] = first;
        pending[b] = row >= 0 ? fields[PENDING] : 0;
        for (int i = 0; i < queries; i++) {
            const int t = b * queries + i, j = i - (queries - 1 - n);    // j is 0 at TOKEN
            const int there = row >= 0 && j >= 0;
            tokens[t] = !there ? 0 : j ? d->drafts[(int64_t)row * d->num_drafts + j - 1] : fields[TOKEN];
            positions[t] = there ? start + j : -1;
            token_rows[t] = there ? row : -1;
        }
    }
}

void shoal_accept(const DraftRows *d, const int32_t *sampled, const int32_t *token_ids, const int32_t *rows, const int32_t *starts,
                  const int32_t *verified, const int32_t *unverified, int count, int num_decodes, int queries, int32_t *report,
                  int64_t report_stride) {
    for (int s = 0; s < count; s++) {
        if (rows[s] < 0) continue;
        int32_t *fields = d->table + rows[s] * d->table_stride, *history = d->history + (int64_t)rows[s] * d->length;
        const int is_decode = s < num_decodes, n = is_decode ? verified[s] : 0, unseen = is_decode ? unverified[s] : -1;
        const int at = (is_decode ? (s + 1) * queries : num_decodes * queries + s - num_decodes + 1) - 1 - n;
        const int32_t *tokens = sampled + at, *drafts = token_ids + at + 1;
        int32_t *out = report + s * report_stride;
        const int64_t place = (int64_t)d->earlier[rows[s]] + starts[s] + 1;
        int used = 1;
        while (used <= n && tokens[used - 1] == drafts[used - 1]) used++;
        for (int i = 0; i < used; i++) {
            out[REPORT_SIZE + i] = tokens[i];
            history[(place + i) % d->length] = tokens[i];
        }
        out[REPORT_TOKENS] = used, out[REPORT_VERIFIED] = n, out[REPORT_DRAFTS] = 0;
        out[REPORT_FIRST] = unseen >= 0 ? 1 + (tokens[0] == unseen) : 0;
        fields[TOKEN] = tokens[used - 1], fields[POSITION] = starts[s] + used, fields[NUM_DRAFTS] = 0;
        fields[PENDING] = used - 1;
    }
}

// Returns how many tokens up to `end` are the same as those up to `last`, at most `most`.
static int match(const int32_t *tokens, int length, int64_t end, int64_t last, int64_t oldest, int most) {
    int n = 0;
    while (n < most && end - n > oldest && tokens[(end - n - 1) % length] == tokens[(last - n - 1) % length]) n++;
    return n;
}

typedef struct {
    const DraftRows *drafts;
    const int32_t *rows;
    int32_t *report;
    int64_t report_stride;
    int max_drafts, min_match, max_match;
} Look;

static void look_up_unit(void *shared, int s, int thread) {
    const Look *job = shared;
    const DraftRows *d = job->drafts;
    (void)thread;
    if (job->rows[s] < 0) return;
    int32_t *fields = d->table + job->rows[s] * d->table_stride, *drafts = d->drafts + (int64_t)job->rows[s] * d->num_drafts;
    const int32_t *tokens = d->history + (int64_t)job->rows[s] * d->length;
    const int64_t last = (int64_t)d->earlier[job->rows[s]] + fields[POSITION] + 1, oldest = last > d->length ? last - d->length : 0;
    const int32_t token = tokens[(last - 1) % d->length];
    int best = job->min_match - 1;
    int64_t at = last;
    for (int64_t end = oldest + 1; end < last && best < job->max_match; end++)
        if (tokens[(end - 1) % d->length] == token) {
            const int n = match(tokens, d->length, end, last, oldest, job->max_match);
            if (n > best) best = n, at = end;
        }
    int32_t *out = job->report + s * job->report_stride, *reported = out + job->report_stride - d->num_drafts;
    int n = 0;
    for (; n < job->max_drafts && at + n < last; n++) reported[n] = drafts[n] = tokens[(at + n) % d->length];
    fields[NUM_DRAFTS] = out[REPORT_DRAFTS] = n;
}

void shoal_look_up(const DraftRows *d, const int32_t *rows, int count, int max_drafts, int min_match, int max_match, int32_t *report,
                   int64_t report_stride) {
    parallel(look_up_unit, &(Look){d, rows, report, report_stride, max_drafts, min_match, max_match}, count);
}

// A look-up that counts: the oracle is look_up_suffix.
typedef struct {
    const DraftRows *drafts;
    const int32_t *rows;
    int32_t *report, *rooms;    // a room for each row
    int64_t report_stride;
    int max_drafts, depth;
    double factor, min_probability;
} SuffixLook;

static int by_value(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

// Sorts `n` tokens, and returns the most frequent one, of equals the smallest. *count gets its number.
static int32_t most_frequent(int32_t *tokens, int n, int *count) {
    int32_t best = 0;
    qsort(tokens, (size_t)n, sizeof *tokens, by_value);
    *count = 0;
    for (int start = 0, end; start < n; start = end) {
        for (end = start + 1; end < n && tokens[end] == tokens[start];) end++;
        if (end - start > *count) *count = end - start, best = tokens[start];
    }
    return best;
}

static void look_up_suffix_unit(void *shared, int s, int thread) {
    const SuffixLook *job = shared;
    const DraftRows *d = job->drafts;
    (void)thread;
    if (job->rows[s] < 0) return;
    int32_t *fields = d->table + job->rows[s] * d->table_stride, *drafts = d->drafts + (int64_t)job->rows[s] * d->num_drafts;
    const int32_t *history = d->history + (int64_t)job->rows[s] * d->length;
    const int64_t all = (int64_t)d->earlier[job->rows[s]] + fields[POSITION] + 1, oldest = all > d->length ? all - d->length : 0;
    const int last = (int)(all - oldest);
    int32_t *tokens = job->rooms + (int64_t)s * 4 * d->length, *ends = tokens + last, *alive = ends + last, *next = alive + last;
    for (int i = 0; i < last; i++) tokens[i] = history[(oldest + i) % d->length];
    int num_ends = 0, num_best = 0;
    int32_t chosen[job->max_drafts];
    for (int end = 1; end < last; end++) ends[num_ends++] = end;
    double best = 0;
    for (int size = 1; size <= job->depth; size++) {
        int n = 0;
        for (int i = 0; i < num_ends; i++)
            if (ends[i] >= size && tokens[ends[i] - size] == tokens[last - size]) ends[n++] = ends[i];
        if (!(num_ends = n)) break;
        if (n > MOST_PLACES) {
            memmove(ends, ends + n - MOST_PLACES, sizeof(int32_t) * MOST_PLACES);
            num_ends = MOST_PLACES;
        }
        int limit = (int)(size * job->factor);
        if (limit > job->depth - size) limit = job->depth - size;
        if (limit > job->max_drafts) limit = job->max_drafts;
        int32_t found[limit > 0 ? limit : 1];
        int num = 0, num_alive = num_ends;
        double score = 0, probability = 1;
        memcpy(alive, ends, sizeof(int32_t) * (size_t)num_ends);
        while (num < limit) {
            int count = 0, followers = 0;
            for (int i = 0; i < num_alive; i++)
                if (alive[i] + num < last) next[followers++] = tokens[alive[i] + num];
            if (!followers) break;
            const int32_t token = most_frequent(next, followers, &count);
            probability *= (double)count / followers;
            if (probability < job->min_probability) break;
            n = 0;
            for (int i = 0; i < num_alive; i++)
                if (alive[i] + num < last && tokens[alive[i] + num] == token) alive[n++] = alive[i];
            num_alive = n, found[num++] = token, score += probability;
        }
        if (num && score >= best) {
            best = score, num_best = num;
            memcpy(chosen, found, sizeof(int32_t) * (size_t)num);
        }
    }
    int32_t *out = job->report + s * job->report_stride;
    memcpy(drafts, chosen, sizeof(int32_t) * (size_t)num_best);
    memcpy(out + job->report_stride - d->num_drafts, chosen, sizeof(int32_t) * (size_t)num_best);
    fields[NUM_DRAFTS] = out[REPORT_DRAFTS] = num_best;
}

// Returns -1 if there is no memory.
int shoal_look_up_suffix(const DraftRows *d, const int32_t *rows, int count, int max_drafts, int depth, double factor, double min_probability,
                         int32_t *report, int64_t report_stride) {
    int32_t *rooms = malloc(sizeof(int32_t) * 4 * (size_t)d->length * (size_t)(count ? count : 1));
    if (!rooms) return -1;
    parallel(look_up_suffix_unit, &(SuffixLook){d, rows, report, rooms, report_stride, max_drafts, depth, factor, min_probability}, count);
    free(rooms);
    return 0;
}
