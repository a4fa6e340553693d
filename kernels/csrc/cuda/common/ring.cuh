// Where a warp is in a ring of stages that a pipeline goes round and round.
#pragma once

#include <cstdint>

namespace trirun {

// stage: the one in hand. phase: how often the ring was gone round, modulo 2, which is the parity that barriers of
// stages are waited for with. Kept beside the stage, since dividing a count by the number of stages takes as long as
// what is done with a stage.
struct Ring {
  uint32_t stage = 0, phase = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == static_cast<uint32_t>(stages)) stage = 0, phase ^= 1;
  }
  // Back by one.
  __device__ __forceinline__ void retreat(int stages) {
    if (stage == 0) stage = stages, phase ^= 1;
    stage--;
  }
  // By several, at most `stages`: teams that take turns.
  __device__ __forceinline__ void advance(int stages, int step) {
    stage += step;
    if (stage >= static_cast<uint32_t>(stages)) stage -= stages, phase ^= 1;
  }
};

}  // namespace trirun
