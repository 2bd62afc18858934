// Speculation on the rows of the batch state. kernels/drafting/reference.py says what each function does.

#include "cpu.h"

enum { TOKEN = 0, POSITION = 1, MAX_TOKENS = 8, NUM_DRAFTS = 9 };    // the same as Field in state.py
enum { REPORT_TOKENS, REPORT_VERIFIED, REPORT_DRAFTS, REPORT_FIRST, REPORT_SIZE };    // the same as Report in draft_rows.py

// The batch state's rows, with their drafts and tokens.
typedef struct {
    int32_t *table, *drafts, *history;
    int64_t table_stride;
    int32_t num_drafts, length;    // K and L
} DraftRows;

void shoal_begin_verification(const DraftRows *d, const int32_t *rows, int count, int queries, int32_t *tokens, int32_t *positions,
                              int32_t *token_rows, int32_t *kv_lens, int32_t *starts, int32_t *verified) {
    for (int b = 0; b < count; b++) {
        const int32_t row = rows[b], *fields = d->table + row * d->table_stride;
        int start = -1, n = 0;
        if (row >= 0) {
            const int most = (fields[MAX_TOKENS] < queries ? fields[MAX_TOKENS] : queries) - 1;
            start = fields[POSITION];
            n = fields[NUM_DRAFTS] < most ? fields[NUM_DRAFTS] : most;
            n = n > 0 ? n : 0;
        }
        kv_lens[b] = start + 1 + n, starts[b] = start, verified[b] = n;
        for (int i = 0; i < queries; i++) {
            const int t = b * queries + i, j = i - (queries - 1 - n);    // j is 0 at TOKEN
            const int there = row >= 0 && j >= 0;
            tokens[t] = !there ? 0 : j ? d->drafts[(int64_t)row * d->num_drafts + j - 1] : fields[TOKEN];
            positions[t] = there ? start + j : -1;
            token_rows[t] = there ? row : -1;
        }
    }
}

void shoal_accept(const DraftRows *d, const int32_t *sampled, const int32_t *rows, const int32_t *starts, const int32_t *verified, int count,
                  int num_decodes, int queries, int32_t *report, int64_t report_stride) {
    for (int s = 0; s < count; s++) {
        if (rows[s] < 0) continue;
        int32_t *fields = d->table + rows[s] * d->table_stride, *history = d->history + (int64_t)rows[s] * d->length;
        const int32_t *drafts = d->drafts + (int64_t)rows[s] * d->num_drafts;
        const int is_decode = s < num_decodes, n = is_decode ? verified[s] : 0;
        const int32_t *tokens = sampled + (is_decode ? (s + 1) * queries : num_decodes * queries + s - num_decodes + 1) - 1 - n;
        int32_t *out = report + s * report_stride;
        int used = 1;
        while (used <= n && tokens[used - 1] == drafts[used - 1]) used++;
        for (int i = 0; i < used; i++) {
            out[REPORT_SIZE + i] = tokens[i];
            history[(starts[s] + 1 + i) % d->length] = tokens[i];
        }
        out[REPORT_TOKENS] = used, out[REPORT_VERIFIED] = n;
        out[REPORT_FIRST] = is_decode && n == 0 && fields[NUM_DRAFTS] > 0 ? 1 + (tokens[0] == drafts[0]) : 0;
        fields[TOKEN] = tokens[used - 1], fields[POSITION] = starts[s] + used;
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
    const int64_t last = fields[POSITION] + 1, oldest = last > d->length ? last - d->length : 0;
    const int32_t token = tokens[(last - 1) % d->length];
    int best = job->min_match - 1;
    int64_t at = last;
    // The ring is two runs at most, each of which is scanned as it lies in memory.
    for (int64_t end = oldest + 1; end < last && best < job->max_match; end++)
        if (tokens[(end - 1) % d->length] == token) {
            const int n = match(tokens, d->length, end, last, oldest, job->max_match);
            if (n > best) best = n, at = end;
        }
    int n = 0;
    for (; n < job->max_drafts && at + n < last; n++) drafts[n] = tokens[(at + n) % d->length];
    fields[NUM_DRAFTS] = job->report[s * job->report_stride + REPORT_DRAFTS] = n;
}

void shoal_look_up(const DraftRows *d, const int32_t *rows, int count, int max_drafts, int min_match, int max_match, int32_t *report,
                   int64_t report_stride) {
    parallel(look_up_unit, &(Look){d, rows, report, report_stride, max_drafts, min_match, max_match}, count);
}
