/* Scratch memory of the library's threads: kept from call to call, because asking the system takes longer than a small
 * product, and on 2 MiB pages, because kernels read it at strides of many small ones. */
#include "memory.h"

#include <stdlib.h>
#include <sys/mman.h>

namespace trirun {
namespace {

struct Scratch {
  void* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { free(memory); }
};
thread_local Scratch thread_scratch[kScratchSlots];

}  // namespace

void* scratch(ScratchSlot slot, int64_t bytes) {
  Scratch& own = thread_scratch[slot];
  if (bytes > own.size) {
    free(own.memory);
    own.size = 0;
    const int64_t page = bytes >= (1 << 17) ? 1 << 21 : 4096;
    bytes = round_up(bytes, page);
    own.memory = aligned_alloc(static_cast<size_t>(page), static_cast<size_t>(bytes));
    if (!own.memory) return nullptr;
    if (page > 4096) madvise(own.memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    own.size = bytes;
  }
  return own.memory;
}

}  // namespace trirun
