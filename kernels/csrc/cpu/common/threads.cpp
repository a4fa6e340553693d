/* The thread pool: a region begins with one store to the epoch that every worker watches, and its barriers are those of
 * log2(size) meetings of two threads. What makes both fast is how a thread waits: it looks, pauses, yields, and only
 * then sleeps on a futex. */
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trirun {
namespace {

constexpr int kMaxThreads = 512;

/* Long enough to bridge what lies between two tokens (sampling and detokenizing in Python: 50 to 250 us), short enough
 * not to hold a core that another thread could use. */
constexpr int64_t kSpinNanoseconds = 300'000;

/* Looks one after another, 0.1 us: threads that share a step mostly meet within that, and a pause between two looks is
 * a good part of it. */
constexpr int kLooks = 100;

/* How long a thread sleeps at a barrier before it looks again by itself. */
constexpr timespec kNap = {0, 1'000'000};

/* Looks with a pause after each before a waiting thread offers its core. */
constexpr int kSpins = 64;

void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, const timespec* most) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, most, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

/* Returns once done(*word): spins, then sleeps, for `most` at a time where it is given. `sleepers` counts the threads
 * that may be asleep on the word; publish() reads it after its store, both sequentially consistent, so no wake-up is
 * lost. */
template <class Done>
void wait_until(std::atomic<uint32_t>* word, std::atomic<int>* sleepers, Done&& done, const timespec* most = nullptr) {
  for (int i = 0; i < kLooks; ++i)
    if (done(word->load(std::memory_order_acquire))) return;
  for (int i = 0; i < kSpins; ++i) {
    if (done(word->load(std::memory_order_acquire))) return;
    pause_core();
  }
  int64_t deadline = now() + kSpinNanoseconds;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done(word->load(std::memory_order_acquire))) return;
      pause_core();
    }
    /* The thread that is waited for may want this very core: other programs and a server's connections share it.
     * Where nobody does, this costs 0.3 us. */
    sched_yield();
  } while (now() < deadline);
  sleepers->fetch_add(1);
  for (uint32_t seen; !done(seen = word->load());) futex_wait(word, seen, most);
  sleepers->fetch_sub(1);
}

/* To be called after the word was changed with a sequentially consistent store. */
void publish(std::atomic<uint32_t>* word, std::atomic<int>* sleepers) {
  if (sleepers->load() > 0) futex_wake_all(word);
}

thread_local bool inside_region = false;

struct Pool {
  std::mutex one_region;
  int workers = 0;
  pid_t owner = getpid();

  alignas(64) std::atomic<uint32_t> epoch{0};
  std::atomic<int> epoch_sleepers{0};
  void (*body)(void*, Team&) = nullptr;
  void* context = nullptr;
  int size = 0;
  uint32_t start_epoch[kMaxThreads] = {};

  /* Workers of the running region that have not finished; the caller waits for 0. */
  alignas(64) std::atomic<uint32_t> unfinished{0};
  std::atomic<int> caller_asleep{0};
  Progress progress[kMaxThreads];

  void work(int rank) {
    inside_region = true;
    char name[16] = "trirun-";
    snprintf(name + 7, sizeof name - 7, "%d", rank);
    pthread_setname_np(pthread_self(), name);
    uint32_t seen = start_epoch[rank];
    for (;;) {
      wait_until(&epoch, &epoch_sleepers, [seen](uint32_t value) { return value != seen; });
      /* Regions are separated by the wait for `unfinished` of those who took part; a worker that did not may have
       * slept through several epochs, and only the current one matters to it. */
      seen = epoch.load(std::memory_order_acquire);
      const int size = static_cast<int>(seen & 0x3ff);
      if (rank >= size) continue;
      Team team(rank, size, progress);
      body(context, team);
      if (unfinished.fetch_sub(1) == 1) publish(&unfinished, &caller_asleep);
    }
  }

  void grow(int threads) {
    while (workers < threads - 1) {
      int rank = workers + 1;
      start_epoch[rank] = epoch.load();
      try {
        std::thread(&Pool::work, this, rank).detach();
      } catch (const std::system_error&) {
        return;
      }
      workers = rank;
    }
  }

  void run(int threads, void (*task)(void*, Team&), void* task_context) {
    std::lock_guard<std::mutex> lock(one_region);
    grow(threads);
    if (threads > workers + 1) threads = workers + 1;
    body = task;
    context = task_context;
    unfinished.store(static_cast<uint32_t>(threads - 1));
    for (int rank = 0; rank < threads; ++rank) progress[rank].reached.store(0, std::memory_order_relaxed);
    /* The team's size travels in the epoch's low bits, so that a worker reads both in one load. */
    epoch.store(((epoch.load(std::memory_order_relaxed) >> 10) + 1) << 10 | static_cast<uint32_t>(threads));
    publish(&epoch, &epoch_sleepers);

    inside_region = true;
    Team team(0, threads, progress);
    task(task_context, team);
    inside_region = false;
    wait_until(&unfinished, &caller_asleep, [](uint32_t left) { return left == 0; });
  }
};

std::atomic<Pool*> pool{nullptr};

/* The child of a fork has none of the pool's threads, and the pool's lock may be held by one of them: it is left
 * behind and a new one is made on demand. */
void forget_pool() { pool.store(nullptr); }

Pool* get_pool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current) return current;
  static std::once_flag fork_handler;
  std::call_once(fork_handler, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
  Pool* fresh = new (std::nothrow) Pool;
  if (!fresh) return nullptr;
  if (!pool.compare_exchange_strong(current, fresh)) {
    delete fresh;
    return current;
  }
  return fresh;
}

}  // namespace

/* The dissemination barrier (Hensgen, Finkel & Manber 1988): in round r a thread says that it is there and waits for
 * the one 2^r places before it, so that after log2(size) rounds it has heard of all. Two threads meet in the time that
 * a cache line takes from one to the other. */
void Team::wait_for_all() {
  for (int distance = 1; distance < size_; distance *= 2) {
    Progress& own = progress_[rank_];
    /* Without a fence, whose price is that of the whole meeting: whoever falls asleep this very moment may be
     * overlooked, and has a nap. */
    own.reached.store(++reached_, std::memory_order_release);
    if (own.sleepers.load(std::memory_order_relaxed) > 0) futex_wake_all(&own.reached);
    Progress& other = progress_[(rank_ + size_ - distance) % size_];
    const uint32_t wanted = reached_;
    wait_until(
        &other.reached, &other.sleepers, [wanted](uint32_t value) { return static_cast<int32_t>(value - wanted) >= 0; },
        &kNap);
  }
}

void parallel_raw(int threads, void (*body)(void*, Team&), void* context) {
  if (threads > kMaxThreads) threads = kMaxThreads;
  Pool* shared = threads > 1 && !inside_region ? get_pool() : nullptr;
  if (shared) return shared->run(threads, body, context);
  Team alone(0, 1, nullptr);
  body(context, alone);
}

}  // namespace trirun
