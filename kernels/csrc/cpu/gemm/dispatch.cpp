/* The choice of instruction set: the best of those this machine has, once per process, unless a name was given. One
 * library holds them all, each in sources of its own that are compiled with its flags; this one is compiled for every
 * processor of the family and asks cpuid. */
#include <stdlib.h>
#include <string.h>

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "isa.h"

namespace trirun {
namespace {

std::atomic<const Isa*> chosen{nullptr};

#if defined(__x86_64__)
/* AMX, and leave to use it: Linux grants the tile registers to a process on request. */
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

/* __builtin_cpu_supports knows "f16c" only from GCC 11 on. */
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* Whether this machine runs what scripts/trirun_toolchain.py compiles for the instruction set, the operating system's
 * part included. */
bool machine_has(const Isa& candidate) {
  if (&candidate == &kPortable) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni");
  if (&candidate == &kAvx2) return avx2;
  if (&candidate == &kAvx512Vnni) return avx512vnni;
  if (&candidate == &kAmx) return avx512vnni && has_amx();
#endif
  return false;
}

const Isa* find_isa(const char* name) {
  const Isa* candidates[] = {&kAmx, &kAvx512Vnni, &kAvx2, &kPortable};
  for (const Isa* candidate : candidates)
    if (candidate->name && (!name || !*name || !strcmp(name, candidate->name)) && machine_has(*candidate))
      return candidate;
  return nullptr;
}

}  // namespace

const Isa& isa() {
  const Isa* current = chosen.load(std::memory_order_acquire);
  if (!current) {
    current = find_isa(getenv("TRIRUN_CPU_ISA"));
    // An unknown or missing instruction set was asked for: the library says "portable", which doctor shows.
    if (!current) current = &kPortable;
    chosen.store(current, std::memory_order_release);
  }
  return *current;
}

bool set_isa(const char* name) {
  const Isa* found = find_isa(name);
  if (found) chosen.store(found);
  return found != nullptr;
}

}  // namespace trirun
