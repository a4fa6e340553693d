/* A persistent thread pool with fast fork-join, for kernels that take microseconds.
 *
 *   parallel(threads, [&](Team& team) {
 *     Range rows = team.share(m);       // static, contiguous: the same rows on the same rank every time
 *     ...                               // rank 0 is the calling thread
 *     team.barrier();                   // every rank's writes are visible to every rank after it
 *   });
 *
 * Waiting threads spin briefly (a decode step comes back within microseconds) and then sleep on a futex, so that an
 * idle pool costs nothing and an oversubscribed machine still makes progress. One region runs at a time: concurrent
 * callers queue. A region opened inside a region runs alone on its thread. After fork() the child starts a new pool.
 * Bodies must not throw.
 */
#ifndef TRIRUN_CPU_THREADS_H
#define TRIRUN_CPU_THREADS_H

#include <atomic>
#include <cstdint>

namespace trirun {

struct Range {
  int64_t begin, end;
};

/* Share `rank` of `total` items cut into `size` contiguous shares that differ by at most one item. */
static inline Range share_of(int64_t total, int rank, int size) {
  return {total * rank / size, total * (rank + 1) / size};
}

/* How far a thread has come through its team's barriers, on a cache line of its own. */
struct alignas(64) Progress {
  std::atomic<uint32_t> reached{0};
  std::atomic<int> sleepers{0};
};

class Team {
 public:
  /* `progress` is the team's, [size], all at 0. */
  Team(int rank, int size, Progress* progress) : rank_(rank), size_(size), progress_(progress) {}
  int rank() const { return rank_; }
  int size() const { return size_; }
  Range share(int64_t total) const { return share_of(total, rank_, size_); }
  void barrier() {
    if (size_ > 1) wait_for_all();
  }

 private:
  void wait_for_all();

  int rank_, size_;
  Progress* progress_;
  uint32_t reached_ = 0;  /* what this thread's progress says */
};

/* Runs body(context, team) on `threads` threads, the caller's included, and returns when all are done. Where the
 * system grants fewer threads, team.size() says how many there are. */
void parallel_raw(int threads, void (*body)(void* context, Team& team), void* context);

template <class Body>
static inline void parallel(int threads, Body&& body) {
  parallel_raw(
      threads, [](void* context, Team& team) { (*static_cast<Body*>(context))(team); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace trirun
#endif
