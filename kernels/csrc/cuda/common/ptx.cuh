// PTX that every GPU since Ampere has, one wrapper per instruction; hopper.cuh has what begins with sm_90, wgmma.cuh
// the tensor cores of sm_90a. No other file writes PTX. All that touches memory is volatile and clobbers it: the
// compiler knows neither what the copy engine writes nor when, so the order of the source has to hold.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "trirun.h"

namespace trirun {

// ---- tensor cores: mma.sync. Lane 4r + t holds rows r and r + 8 of a and d, column r of b ---------------------------

// d = a . b + c: a 16 x 32 u8 (four registers: rows r and r + 8, k and k + 16), b 32 x 8 s8, int32 sums.
__device__ __forceinline__ void mma_u8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         const int (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// d += a . b: a 16 x 32 s8, b 32 x 8 s8, int32 sums.
__device__ __forceinline__ void mma_s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                       uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d += a . b: a 16 x 16 and b 16 x 8 of T (fp16 or bf16), fp32 sums.
template <typename T>
__device__ __forceinline__ void mma_16bit(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_16bit<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16bit<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of fp16 with fp16 sums, two neighbours to a register: twice the rate on GeForce GPUs.
__device__ __forceinline__ void mma_f16_sums(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a . b: a 16 x 8 and b 8 x 8, fp32 of which the tensor cores read the upper 19 bits (tf32), fp32 sums.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 tiles of 16-bit values from shared memory to fragments; lane i names row i % 8 of tile i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The transpose of an 8 x 8 matrix of 16-bit elements, of which a lane holds row lane / 4, columns 2 (lane % 4) and
// + 1: rows of w become neighbours in a lane.
__device__ __forceinline__ uint32_t transposed(uint32_t v) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// ---- arithmetic whose instruction, register or place the compiler is not to choose -------------------------------

// word & mask where it stands. Fragments of wgmma are made by it: volatile keeps them ahead of the fence that hands the
// registers over.
__device__ __forceinline__ uint32_t pinned_and(uint32_t word, uint32_t mask) {
  uint32_t r;
  asm volatile("and.b32 %0, %1, %2;" : "=r"(r) : "r"(word), "r"(mask));
  return r;
}

// (value & MASK) | bits as the one instruction it is: given both constants as immediates the compiler takes two.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t and_or(uint32_t value, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(value), "n"(MASK), "r"(bits));
  return r;
}

// A constant in a register, for and_or and its like; as an immediate it would be loaded anew at every use.
template <uint32_t VALUE>
__device__ __forceinline__ uint32_t constant_in_register() {
  uint32_t r;
  asm volatile("mov.b32 %0, %1;" : "=r"(r) : "n"(VALUE));
  return r;
}

// a * b + c of two pairs; the intrinsics would want the types' own structs around every register.
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Says that v may have changed: what is computed from it is then computed here, and not kept in registers from before.
__device__ __forceinline__ void forget(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void forget(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void forget(void*& v) { asm volatile("" : "+l"(v)); }

// The same of one that is used where it is returned; and a lane's number in its warp, read here.
__device__ __forceinline__ uint32_t kept_anew(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
__device__ __forceinline__ int lane_anew() {
  int v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v & 31;
}

// A lane's own value out of a shuffle, which the compiler cannot repeat: else it may compute it anew at every use.
__device__ __forceinline__ uint32_t kept(uint32_t v, int lane) { return __shfl_sync(~0u, v, lane); }

// 2^v, to about two units of the last place; 0 where that is below the smallest normal number.
__device__ __forceinline__ float exp2_approximate(float v) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
}

// 1 / v, to one unit of the last place; 0 where that is below the smallest normal number.
__device__ __forceinline__ float reciprocal_approximate(float v) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(v));
  return reciprocal;
}

// ---- programmatic dependent launch (sm_90 and newer; nothing elsewhere) ------------------------------------------

// Blocks until the stream's previous kernel has ended and its writes are visible.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the stream's next kernel start its own prologue.
__device__ __forceinline__ void dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- shared memory, by 32-bit addresses: half the registers of generic pointers ----------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void* generic_pointer(uint32_t shared) {
  return reinterpret_cast<void*>(__cvta_shared_to_generic(shared));
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load_shared2(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ uint4 load_shared4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ float2 load_shared_float2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ void store_shared16(uint32_t address, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared2(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store_shared2(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_shared4(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- global memory -----------------------------------------------------------------------------------------------

// Four bytes that nothing writes, asked for now rather than where they are needed.
__device__ __forceinline__ uint32_t load_constant(const void* from) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

__device__ __forceinline__ float2 load_constant2(const float* from) {
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
  return v;
}

// 16 bytes, asked for now; of what a kernel before this one wrote.
__device__ __forceinline__ uint4 load_global4(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// 16 bytes that are read once and nothing writes: they take no place in L1.
__device__ __forceinline__ uint4 load_global4_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Brings a line to L2, where there are no registers to ask for it early.
__device__ __forceinline__ void prefetch_l2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// Counts one; returns how many there were. Whoever sees the last count sees what all that counted had stored.
__device__ __forceinline__ unsigned count_arrival(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
__device__ __forceinline__ uint64_t count_arrival(uint64_t* counter) {
  uint64_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
  return before;
}

// Counts one, and begins anew behind `last`.
__device__ __forceinline__ uint32_t count_around(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}

// 64 bits that other CTAs of the GPU write too: relaxed orders nothing, acquire what comes after.
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(uint64_t* to, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
// 16 bytes at once.
struct Relaxed16 {
  uint64_t low, high;
};
__device__ __forceinline__ Relaxed16 load_relaxed16(const void* from) {
  Relaxed16 v;
  asm volatile("{\n\t.reg .b128 v;\n\tld.relaxed.gpu.global.b128 v, [%2];\n\tmov.b128 {%0, %1}, v;\n\t}"
               : "=l"(v.low), "=l"(v.high)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed16(void* to, Relaxed16 v) {
  asm volatile("{\n\t.reg .b128 v;\n\tmov.b128 v, {%1, %2};\n\tst.relaxed.gpu.global.b128 [%0], v;\n\t}" ::"l"(to),
               "l"(v.low), "l"(v.high)
               : "memory");
}
__device__ __forceinline__ void store_relaxed8(void* to, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Stores `next` where `seen` stands; returns what stood there.
__device__ __forceinline__ uint64_t compare_and_swap(uint64_t* at, uint64_t seen, uint64_t next) {
  uint64_t found;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(found)
               : "l"(at), "l"(seen), "l"(next)
               : "memory");
  return found;
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- cp.async: global to shared memory, without registers --------------------------------------------------------

// L2::128B brings the whole line, of which the lanes beside this one want the rest.
__device__ __forceinline__ void copy_async16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// 16 bytes, or zeros.
__device__ __forceinline__ void copy_async16_or_zero(uint32_t shared, const void* global, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(wanted ? 16 : 0)
               : "memory");
}
// The first `bytes` of 16, zeros behind them.
__device__ __forceinline__ void copy_async16_partly(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// 8 or 4 bytes: fewer than 16 go through L1.
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global) {
  if constexpr (BYTES == 16)
    copy_async16(shared, global);
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void copy_async4_or_zero(uint32_t shared, const void* global, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(wanted ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest PENDING groups have landed.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// All copies have, committed or not.
__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- barriers ----------------------------------------------------------------------------------------------------

// THREADS of the CTA meet at hardware barrier `id`; 0 is __syncthreads'.
template <int THREADS>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// Counts there, and does not wait.
template <int THREADS>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// An mbarrier: a phase ends when so many arrivals, and the bytes they announced (hopper.cuh), have come.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(barrier) : "memory");
}

// So many arrivals at once.
__device__ __forceinline__ void barrier_arrive_counted(uint32_t barrier, uint32_t arrivals) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0], %1;\n\t}" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

// Waits for the phase of this parity. The acquire covers what other threads of this CTA, or the copy engine, wrote.
// try_wait (sm_90) sleeps meanwhile, test_wait asks again and again.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

}  // namespace trirun
