/* What this machine can do at most: reading memory, and multiply-adds by type of number.
 *
 *     limits THREADS MIB REPEATS ROUNDS
 *
 * prints one JSON object: medians (and the best) over REPEATS of
 *   read      bytes/s of summing up MIB MiB that no cache holds, by one thread and by THREADS; with and without
 *             prefetching, whichever is faster
 *   f32, bf16, int8    operations/s (a multiply-add is two) of ROUNDS rounds of independent multiply-adds in registers
 *             by THREADS, on tiles (AMX) where the machine has them, else in vectors (int8 with AVX2: widened to 16
 *             bits); null where the processor has no instruction for products of that type
 *
 * Built for the machine it runs on (-march=native): the compiler's macros say what there is. A repeat lasts from the
 * first thread's start to the last one's end, by their own clocks, so that a late wake-up of the caller adds nothing.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define MAX_THREADS 1024
#define MAX_REPEATS 99
#define ACCUMULATORS 12 /* enough to hide a latency of 6 on 2 units, few enough for 16 registers */
#define STREAMS 4
#define PREFETCH_BYTES 4096

typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t words __attribute__((vector_size(VECTOR_BYTES)));

typedef struct Job Job;
struct Job {
  void (*work)(Job *);
  pthread_barrier_t *start;
  const char *data;
  size_t num_bytes;
  size_t prefetch_bytes;
  long rounds;
  int index;
  double started_at, ended_at;
};

static volatile uint64_t word_sink;
static volatile float float_sink;
static volatile float near_one = 0.999f, small = 0.001f; /* volatile: nothing can be computed ahead */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Keep the calling thread on the index-th processor that this process may use. */
static void pin(int index) {
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  int seen = 0, wanted = index % CPU_COUNT(&allowed);
  for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (CPU_ISSET(cpu, &allowed) && seen++ == wanted) {
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      sched_setaffinity(0, sizeof one, &one);
      return;
    }
  }
}

static void *run_job(void *argument) {
  Job *job = argument;
  pin(job->index);
  pthread_barrier_wait(job->start);
  job->started_at = now();
  job->work(job);
  job->ended_at = now();
  return NULL;
}

/* Sums up the job's bytes; num_bytes is a multiple of STREAMS vectors. */
static void read_memory(Job *job) {
  words sum[STREAMS] = {{0}};
  const size_t stride = STREAMS * sizeof(words);
  for (size_t at = 0; at < job->num_bytes; at += stride) {
    const char *from = job->data + at;
    if (job->prefetch_bytes)
      for (size_t line = 0; line < stride; line += 64) __builtin_prefetch(from + job->prefetch_bytes + line);
    for (int i = 0; i < STREAMS; i++) sum[i] += *(const words *)(from + (size_t)i * sizeof(words));
  }
  words all = sum[0] + sum[1] + sum[2] + sum[3];
  word_sink = all[0] + all[1];
}

static void multiply_f32(Job *job) {
  floats factor, term, sum[ACCUMULATORS];
  for (size_t i = 0; i < sizeof(floats) / sizeof(float); i++) factor[i] = near_one, term[i] = small;
  for (int i = 0; i < ACCUMULATORS; i++) sum[i] = term;
  for (long round = 0; round < job->rounds; round++)
    for (int i = 0; i < ACCUMULATORS; i++) sum[i] = sum[i] * factor + term;
  for (int i = 1; i < ACCUMULATORS; i++) sum[0] += sum[i];
  float_sink = sum[0][0];
}
static const double F32_OPS = 2.0 * VECTOR_BYTES / 4;

#if defined(__AVX512BF16__)
static void multiply_bf16(Job *job) {
  __m512 sum[ACCUMULATORS];
  __m512bh left = _mm512_cvtne2ps_pbh(_mm512_set1_ps(small), _mm512_set1_ps(near_one)), right = left;
  for (int i = 0; i < ACCUMULATORS; i++) sum[i] = _mm512_set1_ps(small);
  for (long round = 0; round < job->rounds; round++)
    for (int i = 0; i < ACCUMULATORS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], left, right);
  for (int i = 1; i < ACCUMULATORS; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
  float_sink = _mm512_reduce_add_ps(sum[0]);
}
static const double BF16_OPS = 2.0 * 32;
#else
#define multiply_bf16 NULL
static const double BF16_OPS = 0.0;
#endif

#if defined(__AVX512VNNI__)
static void multiply_int8(Job *job) {
  __m512i sum[ACCUMULATORS];
  __m512i left = _mm512_set1_epi8((char)(small * 3000)), right = _mm512_set1_epi8((char)(near_one * 3));
  for (int i = 0; i < ACCUMULATORS; i++) sum[i] = left;
  for (long round = 0; round < job->rounds; round++)
    for (int i = 0; i < ACCUMULATORS; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], left, right);
  for (int i = 1; i < ACCUMULATORS; i++) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
  word_sink = (uint64_t)_mm512_reduce_add_epi32(sum[0]);
}
static const double INT8_OPS = 2.0 * 64;
#elif defined(__AVXVNNI__)
static void multiply_int8(Job *job) {
  __m256i sum[ACCUMULATORS];
  __m256i left = _mm256_set1_epi8((char)(small * 3000)), right = _mm256_set1_epi8((char)(near_one * 3));
  for (int i = 0; i < ACCUMULATORS; i++) sum[i] = left;
  for (long round = 0; round < job->rounds; round++)
    for (int i = 0; i < ACCUMULATORS; i++) sum[i] = _mm256_dpbusd_avx_epi32(sum[i], left, right);
  for (int i = 1; i < ACCUMULATORS; i++) sum[0] = _mm256_add_epi32(sum[0], sum[i]);
  word_sink = (uint64_t)_mm256_extract_epi64(sum[0], 0);
}
static const double INT8_OPS = 2.0 * 32;
#elif defined(__AVX2__)
/* Widened to 16 bits: the products of bytes would have to fit into 16. */
static void multiply_int8(Job *job) {
  __m256i sum[ACCUMULATORS];
  __m256i left = _mm256_set1_epi16((short)(small * 3000)), right = _mm256_set1_epi16((short)(near_one * 3));
  for (int i = 0; i < ACCUMULATORS; i++) sum[i] = left;
  for (long round = 0; round < job->rounds; round++)
    for (int i = 0; i < ACCUMULATORS; i++) {
      sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(left, right));
      __asm__("" : "+x"(left)); /* or one product would do for all rounds */
    }
  for (int i = 1; i < ACCUMULATORS; i++) sum[0] = _mm256_add_epi32(sum[0], sum[i]);
  word_sink = (uint64_t)_mm256_extract_epi64(sum[0], 0);
}
static const double INT8_OPS = 2.0 * 16;
#else
#define multiply_int8 NULL
static const double INT8_OPS = 0.0;
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define TILE_PRODUCTS 4
static const double BF16_TILE_OPS = 2.0 * 16 * 16 * 32, INT8_TILE_OPS = 2.0 * 16 * 16 * 64;

/* Whether Linux lets this process use tiles (it must ask once). */
static int may_use_tiles(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }

/* Eight registers of 16 rows of 64 bytes, all zero: the time does not depend on what is multiplied. */
static void shape_tiles(void) {
  struct {
    uint8_t palette, first_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = 16;
  __asm__ volatile("" : : "r"(&shapes) : "memory"); /* GCC 12 takes the next line to read eight bytes only */
  _tile_loadconfig(&shapes);
}

static void multiply_bf16_tiles(Job *job) {
  shape_tiles();
  for (long round = 0; round < job->rounds; round++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

static void multiply_int8_tiles(Job *job) {
  shape_tiles();
  for (long round = 0; round < job->rounds; round++) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
}
#else
#define TILE_PRODUCTS 0
#define multiply_bf16_tiles NULL
#define multiply_int8_tiles NULL
static const double BF16_TILE_OPS = 0.0, INT8_TILE_OPS = 0.0;
static int may_use_tiles(void) { return 0; }
#endif

/* Seconds that num_threads copies of model take side by side, each on its part of the data. */
static double time_jobs(Job model, int num_threads) {
  static Job jobs[MAX_THREADS];
  static pthread_t threads[MAX_THREADS];
  pthread_barrier_t start;
  const size_t unit = STREAMS * sizeof(words), part = model.num_bytes / (size_t)num_threads / unit * unit;
  pthread_barrier_init(&start, NULL, (unsigned)num_threads);
  for (int i = 0; i < num_threads; i++) {
    jobs[i] = model;
    jobs[i].start = &start;
    jobs[i].index = i;
    jobs[i].num_bytes = part;
    jobs[i].data = model.data + (size_t)i * part;
    if (pthread_create(&threads[i], NULL, run_job, &jobs[i]) != 0) {
      fputs("cannot start a thread\n", stderr);
      exit(1);
    }
  }
  for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
  pthread_barrier_destroy(&start);
  double first = jobs[0].started_at, last = jobs[0].ended_at;
  for (int i = 1; i < num_threads; i++) {
    if (jobs[i].started_at < first) first = jobs[i].started_at;
    if (jobs[i].ended_at > last) last = jobs[i].ended_at;
  }
  return last - first;
}

static int by_size(const void *left, const void *right) {
  const double a = *(const double *)left, b = *(const double *)right;
  return (a > b) - (a < b);
}

typedef struct {
  double median, best;
} Rate;

static Rate measure(Job job, int num_threads, int repeats, double amount) {
  double rates[MAX_REPEATS];
  for (int i = 0; i < repeats; i++) rates[i] = amount / time_jobs(job, num_threads);
  qsort(rates, (size_t)repeats, sizeof(double), by_size);
  return (Rate){rates[repeats / 2], rates[repeats - 1]};
}

static Rate measure_reading(const char *data, size_t num_bytes, int num_threads, int repeats) {
  Job job = {.work = read_memory, .data = data, .num_bytes = num_bytes};
  const Rate plain = measure(job, num_threads, repeats, (double)num_bytes);
  job.prefetch_bytes = PREFETCH_BYTES;
  const Rate ahead = measure(job, num_threads, repeats, (double)num_bytes);
  return ahead.median > plain.median ? ahead : plain;
}

static void print_rate(const char *name, Rate rate) {
  printf("\"%s\": {\"median\": %.6g, \"best\": %.6g}", name, rate.median, rate.best);
}

typedef struct {
  void (*work)(Job *); /* NULL: the processor has no such instruction */
  double round_ops;
} Kernel;

static Kernel vectors(void (*work)(Job *), double ops) { return (Kernel){work, ACCUMULATORS * ops}; }

static Kernel tiles_or(Kernel other, void (*work)(Job *), double ops) {
  return work != NULL && may_use_tiles() ? (Kernel){work, TILE_PRODUCTS * ops} : other;
}

static void print_peak(const char *name, Kernel kernel, int num_threads, int repeats, long rounds) {
  printf(", ");
  if (kernel.work == NULL) {
    printf("\"%s\": null", name);
    return;
  }
  Job job = {.work = kernel.work, .rounds = rounds};
  print_rate(name, measure(job, num_threads, repeats, (double)num_threads * (double)rounds * kernel.round_ops));
}

int main(int count, char **values) {
  if (count != 5) return fputs("usage: limits THREADS MIB REPEATS ROUNDS\n", stderr), 2;
  const int num_threads = atoi(values[1]), repeats = atoi(values[3]);
  const size_t num_bytes = (size_t)atol(values[2]) << 20;
  const long rounds = atol(values[4]);
  if (num_threads < 1 || num_threads > MAX_THREADS || num_bytes == 0 || repeats < 1 || repeats > MAX_REPEATS || rounds < 1)
    return fputs("limits: a number is out of range\n", stderr), 2;
  char *data = mmap(NULL, num_bytes + 2 * PREFETCH_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return fputs("limits: no memory\n", stderr), 1;
#if defined(MADV_HUGEPAGE)
  madvise(data, num_bytes, MADV_HUGEPAGE);
#endif
  memset(data, 1, num_bytes);
  printf("{\"threads\": %d, ", num_threads);
  print_rate("read_one", measure_reading(data, num_bytes, 1, repeats));
  printf(", ");
  print_rate("read", measure_reading(data, num_bytes, num_threads, repeats));
  const Kernel bf16 = tiles_or(vectors(multiply_bf16, BF16_OPS), multiply_bf16_tiles, BF16_TILE_OPS);
  const Kernel int8 = tiles_or(vectors(multiply_int8, INT8_OPS), multiply_int8_tiles, INT8_TILE_OPS);
  print_peak("f32", vectors(multiply_f32, F32_OPS), num_threads, repeats, rounds);
  print_peak("bf16", bf16, num_threads, repeats, rounds);
  print_peak("int8", int8, num_threads, repeats, rounds);
  puts("}");
  return 0;
}
