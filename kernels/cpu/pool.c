/* Threads that run a program: tiles are handed out one by one, and waits spin briefly, then sleep.
 *
 * Every thread walks the ops by itself: it takes tiles of an op until none is left, waits until all of them are done,
 * and goes on to the next op. An op's state is two words, each (run << 32 | count): the next tile to take, and how
 * many are done. A thread that lost its core for a while and comes late finds another run's number there and leaves;
 * so nobody ever waits for a thread that holds no tile.
 *
 * So the caller may come late, too: `pool_start` only hands the program to the other threads, and `pool_wait` takes
 * part in what is left. Between the two the caller's core is free for other work; with one thread nothing is computed
 * before `pool_wait`.
 *
 * While it waits a thread first brings what the next linear op reads into its cache (memory would be idle just then),
 * then spins for some microseconds, then sleeps on a futex. Between two runs a thread spins somewhat longer and gives
 * its core to whoever wants it: the next run comes soon while there is work, and waking a thread takes long.
 */
#define _GNU_SOURCE
#include "amx.h"
#include "quire.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CACHE_LINE 64
/* Pauses before a wait sleeps: about 20 µs on Zen 4 (a pause takes some 40 cycles). */
#define SPINS 2000
/* How long a thread looks for the next run before it sleeps, and the pauses between two looks. */
#define IDLE_NS 200000
#define IDLE_PAUSES 10
/* How many ops ahead a waiting thread looks for one that can prefetch. */
#define LOOK_AHEAD 4

const char *const isa_name = HAS_AMX ? "amx" : HAS_AVX512 ? "avx512" : "avx2";

static const op_class *const CLASSES[NUM_OP_KINDS] = {
    [OP_EMBED] = &embed_class,
    [OP_NORM] = &norm_class,
    [OP_LINEAR] = &linear_class,
    [OP_ROTARY_KV] = &rotary_kv_class,
    [OP_ATTENTION_PLAN] = &attention_plan_class,
    [OP_ATTENTION] = &attention_class,
    [OP_ATTENTION_MERGE] = &attention_merge_class,
    [OP_QUANTIZE] = &quantize_class,
    [OP_ARGMAX] = &argmax_class,
    [OP_ARGMAX_MERGE] = &argmax_merge_class,
    [OP_CHOOSE] = &choose_class,
    [OP_GATHER] = &gather_class,
    [OP_LORA_SHRINK] = &lora_shrink_class,
    [OP_LORA_EXPAND] = &lora_expand_class,
    [OP_GATE] = &gate_class,
    [OP_ROUTE] = &route_class,
    [OP_GROUP] = &group_class,
    [OP_GATHER_PAIRS] = &gather_pairs_class,
    [OP_EXPERTS] = &experts_class,
    [OP_COMBINE] = &combine_class,
};

typedef struct progress {
    _Alignas(CACHE_LINE) _Atomic uint64_t next;     /* run << 32 | next tile */
    _Alignas(CACHE_LINE) _Atomic uint64_t done;     /* run << 32 | tiles done */
    _Atomic uint32_t num_sleeping;                  /* threads that sleep until `done` changes */
    _Atomic int64_t ended_ns;                       /* when the last tile was done; may be noted late, or not at all */
} progress;

/* A run. The step is a copy: a thread that comes late must find the same number of tiles as those before it, though
 * the caller may be filling in the next step by then. */
typedef struct job {
    op *ops;
    step step;
    struct step wanted; /* of the wanted rows alone */
    int32_t num_ops;
    int64_t started_ns;
} job;

static const struct step *step_of(const job *job, const op *op) { return op->is_of_wanted ? &job->wanted : &job->step; }

static step wanted_of(const step *whole) {
    step wanted = *whole;
    wanted.num_rows = whole->num_wanted;
    wanted.query_starts = whole->wanted_starts;
    wanted.num_groups = whole->num_wanted_groups;
    wanted.group_rows = whole->wanted_group_rows;
    wanted.group_starts = whole->wanted_group_starts;
    wanted.group_slots = whole->wanted_group_slots;
    return wanted;
}

typedef struct member {
    pool *pool;
    pthread_t thread;
    int index;
} member;

struct pool {
    _Alignas(CACHE_LINE) _Atomic uint32_t run; /* the last run's number, even; odd while the next is being made. Idle threads sleep on it */
    _Atomic uint32_t num_idle;
    _Atomic int is_closing;
    job job;
    progress *progress; /* [max_ops] */
    member *members;
    int32_t num_threads;
    int32_t max_ops;
};

static _Thread_local struct {
    void *memory;
    int64_t bytes;
} thread_scratch;

void *scratch(int64_t bytes) {
    if (thread_scratch.bytes < bytes) {
        free(thread_scratch.memory);
        thread_scratch.bytes = ceil_div(bytes, 4096) * 4096;
        thread_scratch.memory = aligned_alloc(64, (size_t)thread_scratch.bytes);
        if (!thread_scratch.memory) abort(); /* some pages; the machine is out of memory */
    }
    return thread_scratch.memory;
}

static long futex(_Atomic uint32_t *word, int operation, uint32_t value) {
    return syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* The low half of a word that counts, for futexes (little endian). */
static _Atomic uint32_t *low_half(_Atomic uint64_t *word) { return (_Atomic uint32_t *)word; }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* The next tile of an op, or −1: none is left, or the run is over. */
static int64_t take_tile(progress *p, uint32_t run, int64_t num_tiles) {
    uint64_t seen = atomic_load_explicit(&p->next, memory_order_acquire);
    while ((uint32_t)(seen >> 32) == run && (int64_t)(uint32_t)seen < num_tiles)
        if (atomic_compare_exchange_weak_explicit(&p->next, &seen, seen + 1, memory_order_acq_rel,
                                                  memory_order_acquire))
            return (int64_t)(uint32_t)seen;
    return -1;
}

static void finish_tile(progress *p, int64_t num_tiles) {
    const uint64_t before = atomic_fetch_add(&p->done, 1);
    if ((int64_t)(uint32_t)before + 1 != num_tiles) return;
    atomic_store_explicit(&p->ended_ns, now_ns(), memory_order_relaxed);
    if (atomic_load(&p->num_sleeping)) futex(low_half(&p->done), FUTEX_WAKE, INT32_MAX);
}

/* What a waiting thread brings into its cache: the first op ahead that has something to bring. */
typedef struct ahead {
    int32_t index; /* of the op, −1: none */
    int64_t cursor;
} ahead;

static ahead look_ahead(const job *job, int32_t from) {
    for (int32_t i = from; i < job->num_ops && i < from + LOOK_AHEAD; i++)
        if (CLASSES[job->ops[i].kind]->prefetch) return (ahead){.index = i};
    return (ahead){.index = -1};
}

static void prefetch_some(const pool *pool, const job *job, ahead *ahead, int thread) {
    const op *op = &job->ops[ahead->index];
    ahead->cursor =
        CLASSES[op->kind]->prefetch(op->args, step_of(job, op), thread, pool->num_threads, ahead->cursor);
}

/* Return when all tiles are done, or the run is over. */
static void await_tiles(const pool *pool, const job *job, int32_t index, uint64_t wanted, ahead *ahead, int thread) {
    progress *p = &pool->progress[index];
    for (int spins = 0;; spins++) {
        const uint64_t seen = atomic_load_explicit(&p->done, memory_order_acquire);
        if (seen == wanted || seen >> 32 != wanted >> 32) return;
        if (ahead->index >= 0 && ahead->cursor >= 0) {
            prefetch_some(pool, job, ahead, thread);
        } else if (spins < SPINS) {
            _mm_pause();
        } else {
            atomic_fetch_add(&p->num_sleeping, 1);
            const uint64_t again = atomic_load(&p->done);
            if (again != wanted && again >> 32 == wanted >> 32) futex(low_half(&p->done), FUTEX_WAIT, (uint32_t)again);
            atomic_fetch_sub(&p->num_sleeping, 1);
        }
    }
}

/* A thread's way through a run's ops. Returns early when the run ended without it. */
static void walk_ops(pool *pool, const job *job, uint32_t run, int thread) {
    ahead ahead = look_ahead(job, 0);
    for (int32_t i = 0; i < job->num_ops; i++) {
        progress *p = &pool->progress[i];
        const op *op = &job->ops[i];
        const op_class *class = CLASSES[op->kind];
        const step *step = step_of(job, op);
        const int64_t num_tiles = class->num_tiles(op->args, step, pool->num_threads);
        const uint64_t all_done = (uint64_t)run << 32 | (uint64_t)num_tiles;
        int64_t tile;
        while ((tile = take_tile(p, run, num_tiles)) >= 0) {
            class->run_tile(op->args, step, tile, thread, pool->num_threads);
            finish_tile(p, num_tiles);
        }
        if (ahead.index <= i) ahead = look_ahead(job, i + 1);
        await_tiles(pool, job, i, all_done, &ahead, thread);
        if (atomic_load(&p->done) != all_done) return;
    }
}

/* Add to each op how long it took: from the end of the op before it to its own. */
static void count_times(const pool *pool, const job *job) {
    int64_t since = job->started_ns;
    for (int32_t i = 0; i < job->num_ops; i++) {
        const int64_t ended = atomic_load_explicit(&pool->progress[i].ended_ns, memory_order_relaxed);
        const int64_t until = ended > since ? ended : since; /* an op without tiles, or not noted yet */
        job->ops[i].nanoseconds += until - since;
        job->ops[i].num_calls++;
        since = until;
    }
}

/* Return when there is another run than `last`, or the pool closes, or after IDLE_NS. */
static void look_for_run(const pool *pool, uint32_t last) {
    const int64_t until = now_ns() + IDLE_NS;
    while (atomic_load_explicit(&pool->run, memory_order_acquire) == last && !atomic_load(&pool->is_closing) &&
           now_ns() < until) {
        for (int i = 0; i < IDLE_PAUSES; i++) _mm_pause();
        sched_yield();
    }
}

static void walk(pool *pool, const job *job, uint32_t run, int thread) {
    walk_ops(pool, job, run, thread);
#if HAS_AMX
    _tile_release();
#endif
}

static void *serve(void *argument) {
    member *me = argument;
    pool *pool = me->pool;
    uint32_t last = 0;
    while (!atomic_load(&pool->is_closing)) {
        const uint32_t run = atomic_load_explicit(&pool->run, memory_order_acquire);
        if (run == last) {
            look_for_run(pool, last);
            atomic_fetch_add(&pool->num_idle, 1);
            if (atomic_load(&pool->run) == last && !atomic_load(&pool->is_closing)) futex(&pool->run, FUTEX_WAIT, last);
            atomic_fetch_sub(&pool->num_idle, 1);
            continue;
        }
        if (run % 2) { /* being made */
            _mm_pause();
            continue;
        }
        const job mine = pool->job;
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load(&pool->run) != run) continue; /* the copy may be torn */
        last = run;
        walk(pool, &mine, run, me->index);
    }
    free(thread_scratch.memory);
    return NULL;
}

void pool_start(pool *pool, op *ops, int32_t num_ops, const step *step) {
    const uint32_t run = atomic_load(&pool->run) + 2;
    atomic_store(&pool->run, run - 1);
    for (int32_t i = 0; i < num_ops; i++) {
        atomic_store_explicit(&pool->progress[i].next, (uint64_t)run << 32, memory_order_relaxed);
        atomic_store_explicit(&pool->progress[i].done, (uint64_t)run << 32, memory_order_relaxed);
    }
    pool->job = (job){
        .ops = ops, .step = *step, .wanted = wanted_of(step), .num_ops = num_ops, .started_ns = now_ns()};
    atomic_store(&pool->run, run);
    if (pool->num_threads > 1 && atomic_load(&pool->num_idle)) futex(&pool->run, FUTEX_WAKE, INT32_MAX);
}

void pool_wait(pool *pool) {
    walk(pool, &pool->job, atomic_load(&pool->run), 0);
    count_times(pool, &pool->job);
}

pool *pool_open(int32_t num_threads, int32_t max_ops) {
    pool *made = aligned_alloc(CACHE_LINE, ceil_div(sizeof(pool), CACHE_LINE) * CACHE_LINE);
    progress *states = aligned_alloc(CACHE_LINE, (size_t)max_ops * sizeof(progress));
    member *members = calloc((size_t)num_threads, sizeof(member));
    if (!made || !states || !members) {
        free(made), free(states), free(members);
        return NULL;
    }
    memset(made, 0, sizeof(pool));
    memset(states, 0, (size_t)max_ops * sizeof(progress));
    made->progress = states;
    made->members = members;
    made->max_ops = max_ops;
    made->num_threads = 1;
    for (int32_t i = 1; i < num_threads; i++) {
        members[i] = (member){.pool = made, .index = i};
        if (pthread_create(&members[i].thread, NULL, serve, &members[i])) {
            pool_close(made);
            return NULL;
        }
        made->num_threads++;
    }
    return made;
}

void pool_close(pool *pool) {
    atomic_store(&pool->is_closing, 1);
    atomic_fetch_add(&pool->run, 2);
    futex(&pool->run, FUTEX_WAKE, INT32_MAX);
    /* A thread may have gone to sleep on an op of an earlier run whose count looked the same again in a later one. */
    for (int32_t i = 0; i < pool->max_ops; i++) {
        atomic_store(&pool->progress[i].done, UINT64_MAX);
        if (atomic_load(&pool->progress[i].num_sleeping)) futex(low_half(&pool->progress[i].done), FUTEX_WAKE, INT32_MAX);
    }
    for (int32_t i = 1; i < pool->num_threads; i++) pthread_join(pool->members[i].thread, NULL);
    free(pool->members);
    free(pool->progress);
    free(pool);
}
