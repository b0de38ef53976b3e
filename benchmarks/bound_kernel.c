/* The memory traffic of an in-place two-shot all-reduce, without any of its communication.

   A rank of the real thing reads its shard of every rank's buffer and writes the sum to all of
   them. Here the n shards lie one after another in private memory, so nothing is shared and nobody
   waits: no all-reduce in place can move fewer bytes than one read and one write of each. */

#include <stddef.h>
#include <stdint.h>

typedef float Pack __attribute__((vector_size(64), may_alias)); /* 64 bytes: one cache line */

/* a = b = a + b: the case of two ranks, left to the compiler as one plain loop. */
static void sum_pair(Pack* restrict a, Pack* restrict b, size_t packs) {
  for (size_t i = 0; i < packs; ++i) a[i] = b[i] = a[i] + b[i];
}

/* The same for any number of shards. */
static void sum_many(Pack* base, size_t packs, int shards) {
  for (size_t i = 0; i < packs; ++i) {
    Pack sum = base[i];
    for (int k = 1; k < shards; ++k) sum += base[k * packs + i];
    for (int k = 0; k < shards; ++k) base[k * packs + i] = sum;
  }
}

/* `bytes` at `memory`, which is aligned to 64, hold `shards` equal parts; a rest is left alone. */
void two_shot_traffic(void* memory, uint64_t bytes, int shards) {
  size_t packs = bytes / sizeof(Pack) / (size_t)shards;
  Pack* base = memory;
  if (shards == 2)
    sum_pair(base, base + packs, packs);
  else
    sum_many(base, packs, shards);
}
