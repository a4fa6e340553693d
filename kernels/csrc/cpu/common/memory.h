/* Memory that a call needs beside its arguments: each thread's scratch, and the division of a buffer into arrays.
 *
 * One function lays out the arrays of a buffer. Run on an Arena without memory it says how many bytes they take, run
 * on one with memory it says where they are: size and places cannot disagree. */
#ifndef TRIRUN_CPU_MEMORY_H
#define TRIRUN_CPU_MEMORY_H

#include <cstdint>

namespace trirun {

static inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/* Hands out consecutive arrays of some memory, 64 bytes aligned; without memory it only counts. */
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    char* here = base_ ? base_ + used_ : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(here);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

/* Who a thread's scratch memory is for: callers of different layers hold theirs at the same time. */
enum ScratchSlot { kScratchKernel, kScratchActivations, kScratchDecoder, kScratchSampling, kScratchSlots };

/* At least `bytes` of 64-byte aligned memory that belongs to the calling thread until it asks again for the same
 * slot; its contents are arbitrary. Null when memory has run out. */
void* scratch(ScratchSlot slot, int64_t bytes);

}  // namespace trirun
#endif
