/* What the sources say to the compiler. */
#ifndef TRIRUN_CPU_COMPILER_H
#define TRIRUN_CPU_COMPILER_H

/* A function of trirun.h: C linkage, and one of the few symbols that leave the library. */
#define TRIRUN_EXPORT extern "C" __attribute__((visibility("default")))

#define TRIRUN_INLINE inline __attribute__((always_inline))

/* Loops over registers: an array whose indices are not all constants lives in memory. */
#define TRIRUN_UNROLL _Pragma("GCC unroll 16")

#endif
