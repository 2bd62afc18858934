// Threads that help if they are there. A region of OpenMP ends when every thread has arrived, so a core that
// another process takes for a time slice stalls all regions of a step. Here the caller does the remaining
// work itself, and waits only for work that has begun.

#include <pthread.h>
#include <stdatomic.h>

#include "cpu.h"

// SPINS bridges the gap between two ops, or two steps, without going to sleep.
enum { MAX_THREADS = 256, SPINS = 2000 };

static struct {
    pthread_mutex_t caller, sleep;
    pthread_cond_t wake;
    atomic_int wanted, started, helpers, sleepers, job, open, active, next;
    Work work;
    void *shared;
    int units;
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .wanted = 1};

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

static void take_units(int thread) {
    for (int unit; (unit = atomic_fetch_add(&pool.next, 1)) < pool.units;) pool.work(pool.shared, unit, thread);
}

static void *help(void *id) {
    const int thread = (int)(intptr_t)id;
    for (int seen = 0;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.job) == seen; i++) pause_briefly();
        if (atomic_load(&pool.job) == seen) {
            pthread_mutex_lock(&pool.sleep);
            // This comes before the look at `job`, so that a later change of `job` sees a sleeper.
            atomic_fetch_add(&pool.sleepers, 1);
            while (atomic_load(&pool.job) == seen) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.sleep);
        }
        seen = atomic_load(&pool.job);
        // This comes before the look at `open`, because the caller closes first and then waits for active
        // threads.
        atomic_fetch_add(&pool.active, 1);
        if (atomic_load(&pool.open) && thread <= atomic_load(&pool.helpers)) take_units(thread);
        atomic_fetch_sub(&pool.active, 1);
    }
    return 0;
}

static void start_threads(int helpers) {
    for (int id = atomic_load(&pool.started) + 1; id <= helpers; id++) {
        pthread_t thread;
        // If this fails, the caller works alone, or with the threads that there are.
        if (pthread_create(&thread, 0, help, (void *)(intptr_t)id)) return;
        pthread_detach(thread);
        atomic_store(&pool.started, id);
    }
}

void shoal_set_threads(int threads) { atomic_store(&pool.wanted, threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads); }

int max_threads(void) { return atomic_load(&pool.wanted); }

void parallel(Work work, void *shared, int units) {
    const int wanted = max_threads(), helpers = (wanted < units ? wanted : units) - 1;
    // There is too little work, or another engine has the threads.
    if (helpers < 1 || pthread_mutex_trylock(&pool.caller)) {
        for (int unit = 0; unit < units; unit++) work(shared, unit, 0);
        return;
    }
    start_threads(helpers);
    pool.work = work, pool.shared = shared, pool.units = units;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.helpers, helpers);
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.job, 1);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    take_units(0);
    atomic_store(&pool.open, 0);
    while (atomic_load(&pool.active)) pause_briefly();
    pthread_mutex_unlock(&pool.caller);
}
