/* How fast this machine reads memory: the bound of decoding, which reads every weight once per token. */
#include <atomic>

#include "trirun.h"
#include "compiler.h"
#include "numbers.h"
#include "threads.h"

using namespace trirun;

namespace {

/* Four streams per thread and a prefetch some lines ahead keep enough reads in flight on every machine tried. */
constexpr int64_t kStreams = 4, kLine = 64, kAhead = 1024;

uint64_t read_all(const char* memory, int64_t bytes) {
  const int64_t stream = bytes / kStreams / kLine * kLine;
  uint64_t sums[kStreams] = {};
  for (int64_t i = 0; i < stream; i += kLine)
    for (int64_t s = 0; s < kStreams; ++s) {
      const char* line = memory + s * stream + i;
      __builtin_prefetch(line + kAhead);
      const uint64_t* words = reinterpret_cast<const uint64_t*>(line);
      for (int64_t j = 0; j < kLine / 8; ++j) sums[s] += words[j];
    }
  uint64_t sum = 0;
  for (uint64_t part : sums) sum += part;
  return sum;
}

}  // namespace

TRIRUN_EXPORT int trirun_cpu_read(const void* memory, int64_t bytes, int threads, uint64_t* sum) {
  if (!is_array(memory, kLine) || !is_array(sum, 8)) return TRIRUN_BAD_POINTER;
  if (bytes < 0 || bytes > kMaxElements || threads < 1) return TRIRUN_BAD_SHAPE;
  std::atomic<uint64_t> total{0};
  parallel(threads, [&](Team& team) {
    const Range lines = team.share(bytes / kLine);
    total += read_all(static_cast<const char*>(memory) + lines.begin * kLine, (lines.end - lines.begin) * kLine);
  });
  *sum = total;
  return TRIRUN_OK;
}
